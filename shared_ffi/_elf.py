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


def address_of_local_function(path: str, name: str, *, exported: str) -> int:
    """Returns the address, in this process, of a function in the file's static symbol table.

    Args:
        path: the file, already loaded.
        name: the mangled name of the function.
        exported: a symbol that the file exports; its address shows where the file is loaded.

    Raises:
        LookupError: the file has no such symbol (it may be stripped).
    """
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415  (only torch_xla needs it)

    with open(path, "rb") as file:
        elf = ELFFile(file)
        offset = _symbol_value(elf, ".symtab", name)
        exported_offset = _symbol_value(elf, ".dynsym", exported)
    exported_address = ctypes.cast(ctypes.CDLL(path)[exported], ctypes.c_void_p).value
    assert exported_address is not None
    return exported_address - exported_offset + offset


def _symbol_value(elf, table: str, name: str) -> int:  # type: ignore[no-untyped-def]
    """Returns the symbol's address in the file. pyelftools would take seconds for 10^6 symbols."""
    section = elf.get_section_by_name(table)
    if section is None:
        raise LookupError(f"no {table} section")
    symbols = np.frombuffer(section.data(), _SYMBOL)
    strings = elf.get_section(section["sh_link"]).data()
    position = strings.find(b"\0" + name.encode() + b"\0")
    found = symbols[symbols["name"] == position + 1] if position >= 0 else symbols[:0]
    if len(found) == 0:
        raise LookupError(f"no symbol {name} in {table}")
    return int(found["value"][0])
