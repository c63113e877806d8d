"""A buffer as HTML for notebooks: name, shape, and strips of its pages by place and by advice.

This reads only the driver's records of pages: it touches and moves no page, waits for no device and
breaks no capture. A part that cannot be read is replaced by the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from managedmem import _colours as colours
from managedmem._managedmem import Device, Host, ManagedBuffer
from managedmem._strips import MIXED, fold, html_of
from managedmem._units import label_text, size_text

PAGEWISE = 64 << 20
"""Up to this many bytes, advice is read page by page, which takes 3 ms at most."""
PARTS = 32
"""The advice of more bytes is read in at most this many parts. A part whose pages differ in a
property is shown with the default of that property."""
MOST = 16 << 30
"""The places of more bytes than this are not read: that would take longer than 30 ms."""
SHADES = (colours.PURPLE, colours.SKY, colours.YELLOW, colours.VERMILION, colours.BLACK)
NONE, OTHER = "none", "other"
LONGEST = 300
"""A reason is cut to this many characters."""

Advice = tuple[bool, Device | Host | None, frozenset[Device | Host]]


def advice_text(advice: Advice) -> str:
    """A description of advice."""
    read_mostly, preferred, accessed_by = advice
    parts = ["read_mostly"] if read_mostly else []
    if preferred is not None:
        parts.append(f"preferred_location {preferred}")
    if accessed_by:
        parts.append(f"accessed_by {', '.join(sorted(map(str, accessed_by)))}")
    return ", ".join(parts) or NONE


def runs_of(buffer: ManagedBuffer) -> Iterator[tuple[int, int, str]]:
    """The advice of a buffer: offset, bytes, words."""
    if buffer.nbytes <= PAGEWISE:
        for run in buffer.page_runs():
            yield run.offset, run.nbytes, advice_text(run[2:5])
        return
    step = -(-buffer.nbytes // PARTS // (2 << 20)) * (2 << 20)
    for offset in range(0, buffer.nbytes, step):
        part = buffer.range(offset, min(step, buffer.nbytes - offset))
        advice = part.read_mostly, part.preferred_location, frozenset(part.accessed_by)
        yield offset, part.nbytes, advice_text(advice)


def advice_strip(buffer: ManagedBuffer) -> str:
    """The advice of a buffer as HTML: words if all pages have the same, else a strip."""
    runs = list(runs_of(buffer))
    sizes: dict[str, int] = {}
    for _, nbytes, text in runs:
        sizes[text] = sizes.get(text, 0) + nbytes
    if len(sizes) < 2:
        return f"<div>advice: {escape(next(iter(sizes)))}</div>"
    chosen = sorted(sizes.keys() - {NONE}, key=lambda text: (-sizes[text], text))
    styles = {NONE: (colours.UNKNOWN, NONE)}
    styles |= {text: (shade, text) for text, shade in zip(chosen, SHADES, strict=False)}
    styles |= {OTHER: (colours.GREY, OTHER), MIXED: (colours.MIXED, MIXED)}
    known = ((offset, n, text if text in styles else OTHER) for offset, n, text in runs)
    strip = html_of(fold(known, buffer.nbytes, MIXED), styles, "advice")
    return f"<div>advice on its parts:</div>{strip}"


def places(buffer: ManagedBuffer) -> str:
    """The places of the pages of a buffer as HTML."""
    if buffer.nbytes > MOST:
        return f"<div>residency() shows the places of more than {size_text(MOST)}</div>"
    pages = buffer.residency()
    return f"<div>{escape(str(pages))}</div>{pages._strip()}"


def heading(buffer: ManagedBuffer) -> str:
    """The name, the shape and the size of a buffer as HTML."""
    name = "" if buffer.name is None else f"<b>{escape(label_text(buffer.name))}</b> "
    shape = ",".join(map(str, buffer.shape))
    state = "closed" if buffer.is_closed else f"{size_text(buffer.nbytes)} at {buffer.handle:#x}"
    return f"<div>{name}{escape(str(buffer.dtype))}[{shape}], {state}</div>"


def html_of_buffer(buffer: ManagedBuffer) -> str | None:
    """The buffer as HTML. None if even its name fails: IPython then shows the repr."""
    try:
        html = heading(buffer)
        if buffer.is_closed or not buffer.nbytes:
            return html
        try:
            return f"<div>{html}{places(buffer)}{advice_strip(buffer)}</div>"
        except Exception as error:  # such as memory that is not managed: the message says so
            return f"<div>{html}<div>{escape(str(error)[:LONGEST])}</div></div>"
    except Exception:
        return None
