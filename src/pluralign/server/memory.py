"""Return freed memory to the system.

Texts, answers and arrays of many sizes fragment the heap of glibc: the memory in use stays the same, but freed memory
stays with the process, and more of it with every change of the load. ``trim_memory`` gives whole free pages back.
"""

import ctypes
import sys


def trim_memory() -> bool:
    """Return free pages of the heap to the system; whether there were any. It does nothing without glibc.

    It takes a few milliseconds. A fixed threshold for separate mappings (``M_MMAP_THRESHOLD``) avoids the fragments
    too, but makes encoding with MiniLM 11 to 14 % slower.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return bool(trim and trim(0))
