"""Figures of docs/evaluation.md: the studies and the long run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean

from recorded import RESULTS, records, table

from nsa.config import NSAConfig
from nsa.data.recall import NOTE_VALUES
from nsa.evaluation.plots import short
from nsa.train.config import load_config

# The folders of the studies, and what their tables are distinguished by.
STUDIES = {
    "study": "",
    "study-long": ", long study",
    "study-shared": ", shared keys",
    "study-double": ", 10,000 steps",
    "study-seeds": ", other seeds",
    "study-gates": ", open gates",
}
LONGEST = "nsa-double"


def arms_table(title: str, file: Path) -> str:
    """A study's runs, by context and loss."""
    lines, other = [], file.parent / "arms-plain" / "loss.csv"
    plain = losses_of(other) if other.is_file() else {}
    for row in sorted(records(file), key=lambda row: (int(row["seq_len"]), float(row["loss"]))):
        cells = [short(int(row["seq_len"])), f"`{row['arm']}`", f"{int(row['parameters']) / 1e6:.1f}M"]
        cells += [f"{int(row['tokens']) / 1e6:.1f}M", f"{float(row['loss']):.3f}"]
        if plain:
            cells.append(f"{plain[row['arm']]:.3f}" if row["arm"] in plain else "")
        lines.append([*cells, f"{float(row['tokens_per_s']):,.0f}" if row["tokens_per_s"] else ""])
    losses = ["validation loss", "on plain text"] if plain else ["validation loss"]
    return table([title, "arm", "parameters", "tokens", *losses, "tokens per second"], lines)


def accuracy_table(title: str, *files: Path) -> str:
    """By run, task and length: right answers over all depths, numbers of keys, or of hops."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in (row for file in files for row in records(file)):
        scores = found.setdefault((row["run"], row["task"]), {})
        scores.setdefault(int(row["length"]), []).append(float(row["accuracy"]))
    lengths = sorted({length for scores in found.values() for length in scores})
    lines = [[f"`{run}`", task, *(f"{mean(x[n]):.0%}" for n in lengths)] for (run, task), x in found.items()]
    return table([title, "task", *map(short, lengths)], lines)


def long_table(file: Path) -> str:
    """The longest run at each validation, from the curves of its study."""
    lines = [
        [f"{int(row['step']):,}", f"{int(row['tokens']) / 1e6:.1f}M", f"{float(row['seconds']):.0f}"]
        + [f"{float(row[key]):.3f}" if row[key] else "" for key in ("train_loss", "valid_loss")]
        for row in records(file)
        if row["arm"] == LONGEST and row["valid_loss"]
    ]
    return table(["step", "tokens", "seconds", "training loss of 20 steps", "validation loss"], lines)


def evaluation_tables(results: Path = RESULTS / "h200") -> list[Callable[[], str]]:
    """Of those results that are there."""
    tables: dict[str, Callable[[Path], str]] = {}
    for study, words in STUDIES.items():
        tables |= {
            f"{study}/arms.csv": partial(arms_table, f"context{words}"),
            f"{study}/needle.csv": partial(after_table, f"after the extension{words}"),
            f"{study}/arms-needle/needle.csv": partial(accuracy_table, f"before the extension{words}"),
        }
    tables["study-double/curves.csv"] = long_table
    return [partial(make, results / name) for name, make in tables.items() if (results / name).is_file()]


def after_table(title: str, needle: Path) -> str:
    """The needles and the recall of a study's extensions, where there was time for both."""
    return accuracy_table(title, *filter(Path.is_file, (needle, needle.with_name("recall.csv"))))


def losses_of(file: Path) -> dict[str, float]:
    """By arm or run; the first row of a run is the whole."""
    return {row.get("arm") or row["run"]: float(row["loss"]) for row in reversed(records(file))}


def loss_between(file: Path, run: str, begin: int, end: int) -> float:
    """The mean loss of the tokens at these positions."""
    rows = [row for row in records(file) if row["run"] == run][1:]
    inside = [row for row in rows if begin <= int(row["begin"]) and int(row["end"]) <= end]
    return sum(float(row["loss"]) * int(row["tokens"]) for row in inside) / sum(int(row["tokens"]) for row in inside)


def needles_found(file: Path, run: str) -> dict[int, float]:
    """Right answers over all depths, by length."""
    found: dict[int, list[float]] = {}
    for row in records(file):
        if (row["run"], row["task"]) == (run, "needle"):
            found.setdefault(int(row["length"]), []).append(float(row["accuracy"]))
    return {length: mean(scores) for length, scores in found.items()}


def largest_gate(study: Path, arm: str, layers: int) -> float:
    """The largest mean gate of an arm's first layers, rounded up to three decimals."""
    rows = [row for row in records(study / "gates.csv") if row["arm"] == arm and int(row["layer"]) < layers]
    return math.ceil(1000 * max(float(row[branch]) for row in rows for branch in ("cmp", "sel", "win"))) / 1000


def evaluation_sentences() -> Iterator[str]:
    study = RESULTS / "h200" / "study"
    (tokens,) = {int(row["tokens"]) for row in records(study / "arms.csv") if row["arm"] in ("nsa", "dense")}
    yield f"{tokens / 1e6:.1f}M tokens per arm"
    needle, recall, arms_needle = (study / name for name in ("needle.csv", "recall.csv", "arms-needle/needle.csv"))
    (samples,) = {row["samples"] for file in (needle, recall, arms_needle) for row in records(file)}
    yield f"have {samples} prompts per length and depth, or per number of keys or hops"
    yield f"one of the {len(NOTE_VALUES)} values is right in {1 / len(NOTE_VALUES):.0%} of them"
    arms, window = losses_of(study / "arms.csv"), load_config("125m", {"device": "cpu"}).model.attn.w
    yield f"NSA's validation loss is {arms['nsa']:.3f}, that of dense attention {arms['dense']:.3f}"
    places = study / "loss.csv"
    total, near, far = (
        loss_between(places, "dense", *span) - loss_between(places, "nsa", *span)
        for span in ((0, 2048), (0, window), (window, 2048))
    )
    (count,) = {int(row["tokens"]) // 2048 for row in records(places) if row["end"] == "2048" and row["begin"] == "0"}
    yield f"Of the {count} windows in `loss.csv` NSA leads by {total:.3f}: by {near:.3f} at positions 0 to {window - 1}"
    yield f"and by {far:.3f} after them"
    found = {arm: needles_found(arms_needle, arm) for arm in ("nsa", "nsa-no-sel", "nsa-no-cmp")}
    lead = {arm: arms["dense"] - arms[arm] for arm in ("nsa-no-sel", "sliding")}
    yield f"finds at most {max(found['nsa-no-sel'].values()):.0%} of the notes at any length"
    yield f"is still {lead['nsa-no-sel']:.3f} below dense attention"
    yield f"and the sliding window, which has no gates, {lead['sliding']:.3f}."
    curve = {row["step"]: row["valid_loss"] for row in records(study / "curves.csv") if row["arm"] == "nsa-no-cmp"}
    best, drop = min(arms, key=lambda arm: (arm.endswith("k"), arms[arm])), float(curve["2000"]) - float(curve["2250"])
    yield f"`{best}` ends at {arms[best]:.3f}, after a drop of {drop:.3f} from step 2,000 to 2,250"
    yield f"finds {found['nsa-no-cmp'][512]:.0%} of the notes in 512 tokens, where `nsa` finds {found['nsa'][512]:.0%}."
    behind = [arms[arm] - arms["nsa"] for arm in ("nsa-no-sel", "nsa-no-win", "nsa-lr")]
    yield f"selection the loss is {behind[0]:.3f} higher than that of `nsa`, without the window {behind[1]:.3f}."
    yield f"2e-3 (`nsa-lr`) costs NSA {behind[2]:.3f}"
    yield f"{needles_found(needle, 'nsa-64k')[4096]:.0%} of all notes in 4k tokens"
    yield f"each branch's mean gate ends at {largest_gate(study, 'nsa', layers=2):.3f} or less"
    each: dict[int, set[str]] = {}
    for row in records(study / "arms.csv"):
        each.setdefault(int(row["seq_len"]), set()).add(f"{int(row['tokens']) // int(row['steps']):,}")
    (at_2k,), (at_8k,), (at_32k,), (at_64k,) = (each[length] for length in (2048, 8192, 32768, 65536))
    assert at_2k == at_8k
    yield f"number of tokens: {at_2k} at 2k and at 8k, {at_32k} at 32k, {at_64k} at 64k."


def longer_study_sentences(study: Path = RESULTS / "h200" / "study-long") -> Iterator[str]:
    """The sentences on two arms that were trained for longer; none while their folder is absent."""
    if not study.is_dir():
        return
    nsa = next(row for row in records(study / "arms.csv") if row["arm"] == "nsa")
    steps, tokens = int(nsa["steps"]), int(nsa["tokens"])
    yield f"{steps:,} steps, {tokens / 1e6:.1f}M tokens per arm"
    arms, plain = losses_of(study / "arms.csv"), losses_of(study / "arms-plain" / "loss.csv")
    yield f"the validation loss of dense attention is {arms['dense']:.3f}, that of NSA {arms['nsa']:.3f}"
    points = [row for row in records(study / "curves.csv") if row["valid_loss"] and int(row["tokens"]) < tokens]
    last = {row["arm"]: row for row in points if row["arm"] in ("nsa", "dense")}
    ahead = float(last["dense"]["valid_loss"]) - float(last["nsa"]["valid_loss"])
    before = int(last["nsa"]["tokens"]) / 1e6
    yield f"At the validation before, after {before:.1f}M tokens, NSA was ahead by {ahead:.3f}"
    yield f"On plain text NSA's loss is {plain['nsa']:.3f} and that of dense attention {plain['dense']:.3f}"
    for run in ("dense-64k", "nsa-64k"):
        found = needles_found(study / "needle.csv", run)
        yield f"`{run}` finds {', '.join(f'{found[n]:.0%} at {short(n)}' for n in sorted(found))}"
    yield f"each mean gate ends at {largest_gate(study, 'nsa', layers=2):.3f} or less"
    first = RESULTS / "h200" / "study"
    yield f"whose gates end at {largest_gate(first, 'nsa-no-cmp', layers=1):.3f} or less in the first layer"
    open_arms = ("nsa-gate-bias", "nsa-branch-norm")
    found = [max(needles_found(first / "arms-needle" / "needle.csv", arm).values()) for arm in open_arms]
    yield f"whose gates stay open, find at most {max(found):.0%} at any length"


def longest_run_sentences() -> Iterator[str]:
    """The sentences on 10,000 steps, and on branches that share keys."""
    folders = {name: RESULTS / "h200" / f"study-{name}" for name in ("long", "shared", "double")}
    losses = {name: losses_of(study / "arms.csv") for name, study in folders.items()}
    plain = {name: losses_of(study / "arms-plain" / "loss.csv") for name, study in folders.items()}
    first, second = (
        next(row for row in records(folders[name] / "arms.csv") if row["arm"] == LONGEST)
        for name in ("shared", "double")
    )
    assert first["loss"] == second["loss"]
    assert first["commit"] != second["commit"]
    arm = json.loads((folders["double"] / "arms" / f"{LONGEST}.json").read_text())
    assert (arm["skipped"], arm["fallbacks"]) == (0, {})
    tokens = f"{int(second['parameters']) / 1e6:.1f}M parameters, {int(second['tokens']) / 1e6:.1f}M tokens"
    yield f"{tokens}, no step skipped, no fallback"
    yield f"both end at {float(first['loss'])}, to the last digit"
    here, there = (1e3 * json.loads((folders[n] / "steps.json").read_text())[LONGEST] for n in ("double", "shared"))
    yield f"{here:.2f} ms here, {there:.2f} ms in the other run"
    points = {
        (name, row["arm"], row["step"]): row["valid_loss"]
        for name in ("double", "long")
        for row in records(folders[name] / "curves.csv")
    }
    at_3000, at_4000 = (float(points["double", LONGEST, step]) for step in ("3000", "4000"))
    yield f"from {at_3000:.3f} to {at_4000:.3f} between step 3,000 and 4,000"
    yield f"of the [longer study](#the-longer-study) was ({float(points['long', 'nsa', '3000']):.3f})"
    yield f"ended at {losses['long']['nsa']:.3f}, dense attention at {losses['long']['dense']:.3f}"
    before = needles_found(folders["double"] / "arms-needle" / "needle.csv", LONGEST)
    assert before[512] == before[1024]
    yield f"finds {before[512]:.0%} of the notes in 512 and in 1,024 tokens"
    yield f"and {before[2048]:.0%} in 2,048, where it has to choose"
    maps = records(folders["double"] / "needle.csv")
    assert not any(float(r["accuracy"]) for r in maps if r["length"] == "65536" and float(r["value"]) < 1)
    after = needles_found(folders["double"] / "needle.csv", f"{LONGEST}-64k")
    yield f"{after[4096]:.0%} at 4k and {after[65536]:.0%} at 64k"
    shorter = needles_found(RESULTS / "h200" / "study" / "needle.csv", "nsa-64k")
    yield f"after a quarter of the steps ({shorter[4096]:.0%} and {shorter[65536]:.0%})"
    yield f"found {needles_found(folders['long'] / 'needle.csv', 'dense-64k')[65536]:.0%} at 64k"
    arms = records(folders["double"] / "arms.csv")
    yield f"extension of {sum(int(row['steps']) for row in arms if row['arm'] != LONGEST)} steps"
    yield f"each mean gate of the first layer ends at {largest_gate(folders['double'], LONGEST, layers=1):.3f} or less"
    shared, text = losses["shared"], plain["shared"]
    yield f"`nsa-shared` ends at {shared['nsa-shared']:.3f} where `nsa` ended at {losses['long']['nsa']:.3f}"
    flops = {row["arm"]: int(row["flops_per_token"]) for row in records(folders["shared"] / "arms.csv")}
    yield f"{flops['nsa-shared'] / flops[LONGEST] - 1:.0%} more FLOPs per token"
    found = needles_found(folders["shared"] / "arms-needle" / "needle.csv", "nsa-shared")
    yield f"finds at most {max(found.values()):.0%} of the notes at any length"
    yield f"it ends at {shared['nsa-shared-no-cmp']:.3f}, finds none"
    yield f"text ({text['nsa-shared-no-cmp']:.3f}, {text['nsa-shared']:.3f})"


def open_gates_sentences() -> Iterator[str]:
    """The sentences on gates that start open, other seeds, and dense attention of 10,000 steps."""
    folders = [RESULTS / "h200" / f"study-{name}" for name in ("long", "shared", "seeds", "gates", "double")]
    plain, loss, needles, steps, curves = {}, {}, {}, {}, {}
    for study in folders:
        loss |= losses_of(study / "arms.csv")
        plain |= losses_of(study / "arms-plain" / "loss.csv")
        for row in records(study / "arms.csv"):
            steps[row["arm"]] = int(row["steps"])
        for row in records(study / "curves.csv"):
            if row["valid_loss"]:
                curves.setdefault(row["arm"], {})[int(row["step"])] = float(row["valid_loss"])
        for file in filter(Path.is_file, (study / "arms-needle" / "needle.csv", study / "needle.csv")):
            needles |= {run: needles_found(file, run) for run in {row["run"] for row in records(file)}}
    learned = {run for run, found in needles.items() if found.get(512, 0) >= 0.9}
    shorter = {run for run in needles if steps[run] == 5000}
    with_recall, without = (max(loss[x] for x in shorter & learned), min(loss[x] for x in shorter - learned))
    assert with_recall < without
    yield f"{with_recall:.3f} and less, {without:.3f} and more"

    def both(runs: str, of: dict[str, float] = loss) -> str:
        return " and ".join(f"{of[run]:.3f}" for run in runs.split())

    def seeds(*runs: str) -> str:
        return f"{len(learned & {*runs})} of {len(runs)} seeds ({', '.join(f'{loss[run]:.3f}' for run in runs)})"

    double = "nsa-double dense-double"
    yield f"end at {both(double)} after 10,000 steps (on plain text {both(double, plain)})"
    assert learned & {"nsa", "dense", "nsa-seed", "dense-seed"} == {"dense"}
    yield f"they end at {both('nsa dense')} with one seed"
    yield f"and at {both('nsa-seed dense-seed')} with another"
    behind = [loss[f"nsa-double-{n}"] - loss[f"dense-double-{n}"] for n in ("8k", "32k", "64k")]
    yield "by {:.3f} at 8k, {:.3f} at 32k and {:.3f} at 64k".format(*behind)

    bias = NSAConfig.gate_bias
    yield f"With `gate_bias` {bias:.0f} (a sigmoid of {1 / (1 + math.exp(-bias)):.2f})"
    opened = ("nsa-gate-bias", "nsa-gate-bias-seed", "nsa-gate-bias-seed-2")
    yield f"with {seeds(*opened)} and with shared keys ({both('nsa-shared-gate-bias')})"
    yield f"with {seeds('nsa', 'nsa-seed')} and not with shared keys ({both('nsa-shared')})"
    yield f"with {seeds('dense', 'dense-seed')}"
    assert "nsa-shared-gate-bias" in learned
    assert "nsa-shared" not in learned
    twins = [("nsa-gate-bias", "nsa"), ("nsa-gate-bias-seed", "nsa-seed"), ("nsa-shared-gate-bias", "nsa-shared")]
    # To the validation before the fall that is told below.
    until = {one: max(range(2500, 3500, 500), key=lambda s, x=curves[one]: x[s] - x[s + 500]) for one, _ in twins}
    costs = [[curves[a][s] - curves[b][s] for s in curves[a] if 0 < s <= until[a]] for a, b in twins]
    own = [x for each in costs[:2] for x in each]
    yield f"the loss is {-min(own):.3f} lower to {max(own):.3f} higher than with the same seed"
    yield f"with shared keys up to {max(costs[2]):.3f} higher"
    yield f"{both('nsa-gate-bias nsa-gate-bias-seed', plain)} ({both('nsa nsa-seed', plain)} with the same seeds)"
    yield f"with shared keys at {both('nsa-shared-gate-bias', plain)} ({both('nsa-shared', plain)})"
    falls = [max(curves[x][s] - curves[x][s + 500] for s in (2500, 3000)) for x in (*opened, "nsa-shared-gate-bias")]
    yield f"falls by {min(falls):.2f} to {max(falls):.2f} within 500 steps, between step 2,500 and 3,500"

    ours = {run for run in learned if run.startswith("nsa")}
    assert len(ours) == 5
    at_1k, at_2k = ([needles[run][length] for run in ours] for length in (1024, 2048))
    yield f"find {min(at_1k):.0%} to {max(at_1k):.0%} of the notes in 1,024 tokens"
    yield f"and {min(at_2k):.0%} to {max(at_2k):.0%} in 2,048"
    alone, shared, dense = (needles[f"{x}-64k"] for x in ("nsa-double", "nsa-shared-gate-bias", "dense-double"))
    yield f"`nsa-double` finds {alone[4096]:.0%} in 4k tokens"
    yield f"and {alone[65536]:.0%} in 64k; `nsa-shared-gate-bias` finds {shared[4096]:.0%} and {shared[65536]:.0%}"
    assert {dense[n] for n in (4096, 8192, 16384)} == {1.0}
    yield f"`dense-double` finds 100% up to 16k and {dense[65536]:.0%} in 64k"
    yield f"`dense-double` {dense[65536]:.0%}."
    yield f"(`dense-double`), ends at {both('dense-double')}."
    first, rate = losses_of(RESULTS / "h200" / "study" / "arms.csv"), loss["dense-lr"]
    yield f"{rate - loss['dense-seed']:.3f} to {rate - loss['dense']:.3f} after 5,000 steps"
    yield f"NSA {first['nsa-lr'] - first['nsa']:.3f} after 2,500"


def study_sentences() -> Iterator[str]:
    """All sentences of docs/evaluation.md with figures."""
    for make in (evaluation_sentences, longer_study_sentences, longest_run_sentences, open_gates_sentences):
        yield from make()
