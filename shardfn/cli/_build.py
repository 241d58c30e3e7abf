"""`shardfn build`: builds the C++ of all kernels ahead, so that no later program waits for it."""

from shardfn.kernels import build_all, cxx_compiler, generation


def build_command() -> int:
    """Builds all C++ for this processor, and prints a line for each file.

    Returns:
        The exit status: 1 if a file could not be built.
    """
    processor = f"x86-64-v{form}" if (form := generation()) else "this processor"
    print(f"C++ kernels for {processor}, by {cxx_compiler() or 'no compiler'}:", flush=True)
    failed = 0
    for name, state, path in build_all():
        failed += path is None
        print(f"  {name:<24}{state}" + ("" if path is None else f"  {path}"), flush=True)
    if failed:
        print(f"{failed} files could not be built. Kernels run in plain torch, slowly, or raise if the compiler fails.")
    return int(failed > 0)
