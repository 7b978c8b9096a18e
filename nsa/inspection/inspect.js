const find = id => document.getElementById(id);
const meta = JSON.parse(find("meta").textContent), NONE = 0xffff, branches = ["cmp", "sel", "win"];
const area = find("text"), rows = area.children, blobs = document.querySelectorAll("script.layer");
const state = { token: meta.n - 1, layer: 0, group: 0, kept: false };
const unpacked = [];
let marked = [];

// Reading what a layer did, once.
function unpack(layer) {
  return unpacked[layer] ??= (async () => {
    const text = atob(blobs[layer].textContent), packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = await new Response(stream).arrayBuffer(), n = meta.n * meta.groups;
    let at = 0;
    const take = (Kind, size) => {
      const values = new Kind(bytes, at, n * size);
      at += values.byteLength;
      return (token, group) => Array.from({ length: size }, (_, k) => values[(group * size + k) * meta.n + token]);
    };
    return { selected: take(Uint16Array, meta.nSel), blocks: take(Uint16Array, meta.top),
      gates: take(Uint8Array, 3), weights: take(Uint8Array, meta.top) };
  })();
}

// The text.
const element = token => rows[Math.floor(token / meta.block)].children[1 + token % meta.block];
function tokenOf(node) {
  if (node.tagName !== "I" || !area.contains(node)) return null;
  const row = node.parentElement;
  return Number(row.firstChild.textContent) * meta.block + Array.prototype.indexOf.call(row.children, node) - 1;
}
function words(begin, end) {
  let text = "";
  for (let token = begin; token < Math.min(end, meta.n); token++) text += element(token).textContent;
  return text;
}
function mark(node, name) { node.classList.add(name); marked.push([node, name]); }

function entry(list, label, text, token) {
  const item = document.createElement("li"), button = document.createElement("button");
  button.append(label + " ");
  const code = document.createElement("code");
  code.textContent = text.trim().replace(/\s+/g, " ").slice(0, 60);
  button.append(code);
  button.onclick = () => element(token).scrollIntoView({ block: "center" });
  item.append(button);
  list.append(item);
}

async function show() {
  const { token, layer, group } = state, data = await unpack(layer);
  if (token !== state.token || layer !== state.layer || group !== state.group) return;
  for (const [node, name] of marked) node.classList.remove(name);
  marked = [];
  const selected = data.selected(token, group).filter(block => block !== NONE);
  const gates = data.gates(token, group), own = Math.floor(token / meta.block);
  for (const block of selected) mark(rows[block], "sel");
  for (let later = token + 1; later < Math.min((own + 1) * meta.block, meta.n); later++) mark(element(later), "later");
  const first = Math.max(0, token - meta.window + 1);
  for (let inside = first; inside <= token; inside++) mark(element(inside), "win");
  mark(element(token), "at");

  find("what").textContent = `Token ${token}: ${JSON.stringify(element(token).textContent)}`;
  find("layer").value = layer;
  find("group").value = group;
  find("gates").replaceChildren(...branches.map((name, branch) => {
    const line = document.createElement("tr"), value = (gates[branch] / 255).toFixed(2);
    line.innerHTML = `<th>${name}</th><td><meter value="${value}"></meter></td><td>${value}</td>`;
    return line;
  }));
  find("selected").replaceChildren();
  for (const block of selected) {
    const forced = block < meta.nInit ? " (first)" : block > own - meta.nLocal ? " (local)" : "";
    const begin = block * meta.block;
    entry(find("selected"), `${block}${forced}`, words(begin, Math.min(begin + meta.block, token + 1)), begin);
  }
  find("compressed").replaceChildren();
  const weights = data.weights(token, group);
  data.blocks(token, group).forEach((block, k) => {
    if (block === NONE) return;
    const begin = block * meta.cmpStride, end = begin + meta.cmpBlock, share = weights[k] / 255;
    for (let inside = begin; inside < end; inside++) {
      mark(element(inside), "cmp");
      element(inside).style.setProperty("--v", share);
    }
    entry(find("compressed"), `${(100 * share).toFixed(0)}% at ${begin}`, words(begin, end), begin);
  });
  find("window").textContent = `tokens ${first} to ${token}`;
  Object.assign(find("panel").dataset, { token, layer: meta.layers[layer], group });
  showAll();
}

// Every layer and group at this token.
const lines = meta.layers.flatMap((number, layer) => Array.from({ length: meta.groups }, (_, group) => {
  const line = document.createElement("tr");
  line.innerHTML = `<th>${number}.${group}</th>` + "<td><meter></meter></td>".repeat(3) + "<td><canvas></canvas></td>";
  line.onclick = () => go({ layer, group });
  return { line, layer, group, meters: line.querySelectorAll("meter"), canvas: line.querySelector("canvas") };
}));
const title = document.createElement("tr");
title.innerHTML = `<th></th>${branches.map(name => `<th>${name}</th>`).join("")}<th>selected blocks</th>`;
find("all").append(title, ...lines.map(line => line.line));
async function showAll() {
  const all = await Promise.all(meta.layers.map((_, layer) => unpack(layer))), { token } = state;
  const color = getComputedStyle(area).getPropertyValue("--c0"), n = Math.max(1, rows.length);
  for (const { line, layer, group, meters, canvas } of lines) {
    line.toggleAttribute("aria-current", layer === state.layer && group === state.group);
    all[layer].gates(token, group).forEach((gate, branch) => { meters[branch].value = gate / 255; });
    canvas.width = 300;
    canvas.height = 12;
    const pen = canvas.getContext("2d");
    pen.fillStyle = color;
    for (const block of all[layer].selected(token, group))
      if (block !== NONE) pen.fillRect(300 * block / n, 0, Math.max(2, 300 / n), 12);
  }
  area.dataset.ready = "yes";
}

// Moving.
function go(change) {
  Object.assign(state, change);
  state.token = Math.min(Math.max(state.token, 0), meta.n - 1);
  state.layer = (state.layer + meta.layers.length) % meta.layers.length;
  state.group = (state.group + meta.groups) % meta.groups;
  show();
}
const keys = {
  ArrowLeft: () => ({ token: state.token - 1 }), ArrowRight: () => ({ token: state.token + 1 }),
  ArrowUp: () => ({ token: state.token - meta.block }), ArrowDown: () => ({ token: state.token + meta.block }),
  Home: () => ({ token: 0 }), End: () => ({ token: meta.n - 1 }),
};
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  const change = keys[event.key]?.();
  if (change && document.activeElement !== area) return;
  if (change) {
    event.preventDefault();
    go({ ...change, kept: true });
    element(state.token).scrollIntoView({ block: "nearest" });
  } else if (event.key === "[" || event.key === "]") go({ layer: state.layer + (event.key === "]" ? 1 : -1) });
  else if (event.key === "g") go({ group: state.group + 1 });
  else if (event.key === "Escape") go({ kept: false });
});
area.addEventListener("mouseover", event => {
  const token = tokenOf(event.target);
  if (token !== null && !state.kept) go({ token });
});
area.addEventListener("click", event => {
  const token = tokenOf(event.target);
  if (token !== null) go({ token, kept: true });
});
for (const [id, names] of [["layer", meta.layers], ["group", [...Array(meta.groups).keys()]]]) {
  find(id).append(...names.map((name, index) => new Option(name, index)));
  find(id).onchange = event => go({ [id]: Number(event.target.value) });
}
// After the first paint.
requestAnimationFrame(() => setTimeout(show));
