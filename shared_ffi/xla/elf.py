"""Finds a function that a loaded ELF file does not export."""

from __future__ import annotations

import ctypes

import numpy as np

_SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)

_NO_SECTION = 0  # SHN_UNDEF
_FUNCTION = 2  # STT_FUNC


def address_of_local_function(path: str, name: str, *, exported: str) -> int:
    """Returns the address, in this process, of a function in the file's static symbol table.

    Args:
        path: the file, already loaded.
        name: the mangled name of the function.
        exported: a symbol that the file exports; its address shows where the file is loaded.

    Raises:
        LookupError: the file does not define one such function (it may be stripped, or import it).
    """
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415  (only torch_xla needs it)

    with open(path, "rb") as file:
        elf = ELFFile(file)
        offset = _function_offset(elf, ".symtab", name)
        exported_offset = _function_offset(elf, ".dynsym", exported)
    exported_address = ctypes.cast(ctypes.CDLL(path)[exported], ctypes.c_void_p).value
    assert exported_address is not None
    return exported_address - exported_offset + offset


def _function_offset(elf, table: str, name: str) -> int:  # type: ignore[no-untyped-def]
    """Returns a function's address in the file. pyelftools would take seconds for 10^6 symbols."""
    section = elf.get_section_by_name(table)
    if section is None:
        raise LookupError(f"no {table} section")
    symbols = np.frombuffer(section.data(), _SYMBOL)
    strings = elf.get_section(section["sh_link"]).data()
    position = strings.find(b"\0" + name.encode() + b"\0")
    found = symbols[symbols["name"] == position + 1] if position >= 0 else symbols[:0]
    # An imported symbol has no section, and the value 0; what is no function cannot be called.
    found = found[(found["section"] != _NO_SECTION) & (found["info"] % 16 == _FUNCTION)]
    offsets = {*found["value"].tolist()}
    if len(offsets) != 1:
        raise LookupError(f"{len(offsets) or 'no'} functions {name} in {table}")
    return int(offsets.pop())
