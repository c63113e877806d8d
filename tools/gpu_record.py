"""The page about one run on GPUs: the machine, counts, what failed, what was skipped and why."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def machine():
    """The machine as the benchmarks describe it, with its number of devices."""
    os.environ["MANAGEDMEM_DRIVER"] = "cuda"
    sys.path.insert(0, str(ROOT))
    from benchmarks import report

    import managedmem

    return {**report.machine(), "devices": managedmem.Device.count(), "kernel": platform.release()}


def commit_of_sources():
    """The commit of this clone, with a mark if something was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def name_of_page(about):
    """The date, the card and the number of devices, as a file name."""
    card = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    many = f"-x{about['devices']}" if about["devices"] > 1 else ""
    return f"{about['date']}-{card}{many}.md"


def text_of(results, about, commit):
    """The page, in Markdown."""
    devices = f"{about['devices']} x " if about["devices"] > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [
        f"# {about['date']}: {devices}{about['gpu']}\n",
        table(
            ["of", "value"],
            [
                ["driver", f"CUDA {about['driver']}"],
                ["Python", about["python"]],
                ["machine", f"{about['machine']}, Linux {about['kernel']}"],
                ["libraries", versions],
                ["commit", commit],
            ],
        ),
        "## Runs\n",
        table(
            ["run", "passed", "failed", "skipped", "seconds", "note"],
            [row_of(name, result) for name, result in results.items()],
        ),
    ]
    failed = sorted({test for result in results.values() for test in result["failed"]})
    parts += ["## Failed\n", "\n".join(f"- `{test}`" for test in failed) or "Nothing.", ""]
    reasons = results.get("whole", results.get("files", {})).get("reasons", {})
    if reasons:
        rows = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        parts += ["## Skipped\n", table(["reason", "tests"], rows)]
    if text := results.get("benchmarks", {}).get("text"):
        parts += ["## Benchmarks\n", f"```text\n{text.rstrip()}\n```\n"]
    return "\n".join(parts)


def row_of(name, result):
    counts = result.get("counts", {})
    failed = counts.get("failed", len(result["failed"]))
    seconds = result.get("seconds", "")
    return [
        name,
        counts.get("passed", ""),
        failed,
        counts.get("skipped", ""),
        seconds,
        result.get("note", ""),
    ]


def write(results, folder, commit=None):
    """Write the page into a folder; its path."""
    about = machine()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name_of_page(about)
    path.write_text(text_of(results, about, commit or commit_of_sources()), encoding="utf-8")
    return path
