"""Kill `nsa`, let its file operations fail and feed it junk, many times at random, and count what does not hold.

    python tests/faults.py --kills 100 --failures 100 --junk 400

- kills: a small run gets SIGKILL, SIGTERM, SIGHUP or SIGUSR1 at any moment;
- failures: its file operations fail with ENOSPC or EIO, one of them or all from then on; started again, both have to
  end with the metrics and parameters, to the bit, of a run that nothing disturbed;
- junk: a config, checkpoint, tokenizer, model or shard is changed; a command that reads it works or ends in one line.

Not collected by pytest.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path

import torch
from forked import Faults, Start
from junk import TARGETS
from training import config_file, lines_of, losses, small_run

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Imported before the forks.
SLOW = ("nsa.train.loop", "nsa.generate", "nsa.data.prepare", "torch._dynamo", "tensorboard.compat.proto.event_pb2")


class Campaign:
    """A small run, what it gives undisturbed, and the problems found."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.out, self.printed = folder, folder / "run", folder / "printed.txt"
        self.chance = random.Random(seed)
        self.problems = 0
        self.files = folder / "files"
        often = {"save_every": 2, "log_every": 3, "eval_every": 4, "sample_every": 5, "keep": 2}
        config = config_file(folder, small_run(self.out, kind="nsa", steps=12, **often))
        self.argv = ["train", "--config", config, "--out", str(self.out)]
        begin = time.monotonic()
        status, printed = Start(self.argv, self.printed, Faults(self.out)).wait()
        self.seconds = time.monotonic() - begin
        assert status == 0, printed
        self.operations = int(printed.split()[-1])
        self.expected = self.go_on()

    def go_on(self) -> object:
        """Start the run again, undisturbed; what it leaves at its end, or how it failed."""
        status, printed = Start(self.argv, self.printed).wait()
        if status != 0 or "Traceback" in printed:
            return f"status {status}: {printed[-2000:]}"
        evaluated = {record["step"]: record["loss"] for record in lines_of(self.out, "eval")}
        return losses(self.out), evaluated, hashlib.sha256((self.out / "model.safetensors").read_bytes()).hexdigest()

    def check(self, name: str, ended: list[tuple[int, str]], statuses: set[int]) -> None:
        wrong = [x for x in ended if x[0] not in statuses or "Traceback" in x[1]]
        found = wrong or self.go_on()
        if found != self.expected:
            self.report(f"{name}: {found}", self.out)

    def report(self, problem: str, files: Path) -> None:
        self.problems += 1
        print(f"PROBLEM {self.problems}: {problem}", flush=True)
        if files.exists():
            shutil.copytree(files, self.folder / f"problem-{self.problems}", symlinks=True)

    def kill(self) -> str:
        shutil.rmtree(self.out, ignore_errors=True)
        ended: list[tuple[int, str]] = []
        names, statuses = [], {0}
        for _ in range(self.chance.randint(1, 3)):
            start, number = Start(self.argv, self.printed), self.chance.choice(SIGNALS)
            time.sleep(self.chance.uniform(0.0, self.seconds))
            os.kill(start.pid, number)
            # Before the run has handlers, a signal does what it does by default.
            statuses.add(-number)
            ended.append(start.wait())
            names.append(number.name)
        self.check(f"kill {' '.join(names)}", ended, statuses)
        return f"{names[-1]}, status {ended[-1][0]}"

    def fail(self) -> str:
        shutil.rmtree(self.out, ignore_errors=True)
        first, code = self.chance.randrange(self.operations), self.chance.choice((errno.ENOSPC, errno.EIO))
        failing = range(first, first + self.chance.choice((1, 1, 3, 10**9)))
        ended = [Start(self.argv, self.printed, Faults(self.out, failing, code)).wait()]
        self.check(f"{errno.errorcode[code]} at {failing} of {self.operations}", ended, {0, 1, 2})
        return f"{errno.errorcode[code]}, status {ended[0][0]}"

    def junk(self) -> str:
        """Change one file of a finished run, or of prepared data with a BPE, and run a command that reads it."""
        template = self.folder / "template"
        if not template.exists():
            self.prepare_files(template)
        shutil.rmtree(self.files, ignore_errors=True)
        shutil.copytree(template, self.files)
        target = self.chance.choice(TARGETS)
        target.spoil(self.files / target.file, self.chance)
        places = {"RUN": "run", "DATA": "data", "CONFIG": "small.yaml", "NEW": "new", "CACHE": "cache.safetensors"}
        places["HF"] = "hf"
        argv = [str(self.files / places[word]) if word in places else word for word in target.argv]
        status, printed = Start(argv, self.printed).wait()
        errors = sum(line.startswith("nsa") for line in printed.splitlines())
        if status not in (0, 1, 2) or "Traceback" in printed or (status != 0 and errors != 1):
            how = f"{target.file} by {target.spoil.__name__}, {' '.join(argv)}"
            self.report(f"{how}: status {status}: {printed[-2000:]}", self.files)
        return f"{target.file} {target.argv[0]}, status {status}"

    def prepare_files(self, template: Path) -> None:
        corpus = template / "corpus.txt"
        config = config_file(template, small_run(self.files / "run", steps=2, save_every=1))
        corpus.write_text("".join(f"{n} bottles of beer on the wall, {n * n} of milk. " for n in range(400)))
        data = ["--path", str(corpus), "--train-bpe", "260", "--out", str(template / "data")]
        run, cache = str(template / "run"), str(template / "cache.safetensors")
        for argv in (
            ["data", "prepare", *data],
            ["train", "--config", config, "--out", run],
            ["generate", "--run", run, "--device", "cpu", "--max-new-tokens", "3", "--save-cache", cache],
            ["export", run, "--to", str(template / "hf")],
        ):
            status, printed = Start(argv, self.printed).wait()
            assert status == 0, printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--kills", "--failures", "--junk"):
        parser.add_argument(flag, type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="the folder to work in, which is kept (default: a temporary one)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in SLOW:
        import_module(name)
    folder = args.keep or Path(tempfile.mkdtemp())
    campaign = Campaign(folder, args.seed)
    print(f"{campaign.operations} file operations, {campaign.seconds:.1f} s undisturbed", flush=True)
    for name, count, attack in (
        ("kills", args.kills, campaign.kill),
        ("failures", args.failures, campaign.fail),
        ("junk", args.junk, campaign.junk),
    ):
        before, ended = campaign.problems, Counter[str]()
        for done in range(1, count + 1):
            ended[attack()] += 1
            if done % 10 == 0 or done == count:
                print(f"{name} {done}/{count}, problems {campaign.problems - before}", flush=True)
        print(f"{name}: {dict(sorted(ended.items()))}", flush=True)
    print(f"problems: {campaign.problems}")
    if args.keep is None:
        shutil.rmtree(folder)
    sys.exit(campaign.problems > 0)


if __name__ == "__main__":
    main()
