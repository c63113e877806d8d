"""Runs a notebook on the emulated driver and keeps its outputs: python tools/run_notebook.py FILE

Its pictures that a page of docs/ shows also go to docs/pictures/, named by their cells. Needs
nbclient, ipykernel and what the notebook imports. Chooses the emulated driver itself.
"""

import base64
import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES = DOCS / "pictures"
PNG = "image/png"


def ran(path):
    """The notebook with the outputs of a run, and without what differs from run to run."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, record_timing=False).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def pictures(notebook, name):
    """The PNG files in the outputs of a notebook, by file name."""
    for cell in notebook["cells"]:
        found = [
            output["data"][PNG]
            for output in cell.get("outputs", ())
            if PNG in output.get("data", ())
        ]
        for number, text in enumerate(found):
            tail = f"-{number}" if number else ""
            yield f"{name}-{cell['id']}{tail}.png", base64.b64decode(text)


def shown(pictures):
    """The pictures that a page of the documentation names."""
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.rst"))
    return {name: content for name, content in pictures if f"pictures/{name}" in text}


def main(path):
    import nbformat

    os.environ["MANAGEDMEM_DRIVER"] = "emulator"
    notebook = ran(path)
    nbformat.write(notebook, path)
    PICTURES.mkdir(exist_ok=True)
    for name, content in shown(pictures(notebook, path.stem)).items():
        (PICTURES / name).write_bytes(content)
        print(f"docs/pictures/{name}: {len(content) // 1024} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
