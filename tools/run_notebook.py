"""Runs a notebook on the emulated driver and keeps its outputs: python tools/run_notebook.py FILE

Its pictures also go to docs/pictures/, named by their cells. Needs nbclient, ipykernel and what the
notebook imports. Without a driver on the machine nothing needs to be set.
"""

import base64
import os
import sys
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
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


def main(path):
    import nbformat

    os.environ["MANAGEDMEM_DRIVER"] = "emulator"
    notebook = ran(path)
    nbformat.write(notebook, path)
    PICTURES.mkdir(exist_ok=True)
    for name, content in pictures(notebook, path.stem):
        (PICTURES / name).write_bytes(content)
        print(f"docs/pictures/{name}: {len(content) // 1024} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
