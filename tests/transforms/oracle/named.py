"""Programs by their names: "2:17" is the random one of seed 17 on two ranks, "2:psum_psum" a known one."""

from .cases import cases
from .generator import Generator
from .programs import Program


def named(name: str) -> Program:
    """The program of a name."""
    world, _, which = name.partition(":")
    if which.isdecimal():
        return Generator(int(which), int(world)).program()
    return next(program for program in cases(int(world)) if program.name == name)
