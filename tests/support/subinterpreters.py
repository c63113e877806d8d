"""A script's functions that create subinterpreters and run code in them, on each Python alike."""

PRELUDE = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

def create(kind):
    if sys.version_info >= (3, 13):
        return interpreters.create(kind)
    return interpreters.create(isolated=kind == "isolated")

def run(interpreter, script):
    "Before 3.13 an error inside is raised, from 3.13 on it is returned."
    problem = interpreters.run_string(interpreter, script)
    assert problem is None, problem
"""
