"""Programs of tests that must run to their last line, and be quiet."""

import textwrap

from programs import run_python


def run_to_the_end(code, **options):
    """Run code in a process of its own, which prints nothing and reaches its end."""
    done = run_python(textwrap.dedent(code) + "\nprint('the end')\n", **options)
    assert (done.stdout, done.stderr) == ("the end\n", "")
