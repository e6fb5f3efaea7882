"""How long `workbench --help` takes: it must answer in a moment, though torch and TransformerLens take seconds.

    python benchmarks/startup.py

Prints medians of interleaved runs: a bare interpreter, the help, and the imports that the help avoids.
"""

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "workbench --help": ["-m", "workbench", "--help"],
    "import transformer_lens": ["-c", "import transformer_lens"],
}
ROUNDS = 5


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    bare = statistics.median(times["python -c pass"])
    for name, measured in times.items():
        median = statistics.median(measured)
        print(f"{name:24} {median:6.3f} s  {median / bare:5.1f} × a bare interpreter")


if __name__ == "__main__":
    main()
