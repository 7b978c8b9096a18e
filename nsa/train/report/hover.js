const tip = document.getElementById("tip");
for (const area of document.querySelectorAll(".hover")) {
  const lines = JSON.parse(area.dataset.lines), svg = area.ownerSVGElement, cross = svg.querySelector(".cross");
  area.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const near = lines.map(([label, points]) => [label, points.reduce(
      (best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)]);
    tip.textContent = near.map(([label, point]) => (label ? label + "  " : "") + point[1]).join("\n");
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
    cross.setAttribute("x1", near[0][1][0]);
    cross.setAttribute("x2", near[0][1][0]);
    cross.style.visibility = "visible";
  });
  area.addEventListener("pointerleave", () => { tip.style.display = "none"; cross.style.visibility = "hidden"; });
}
