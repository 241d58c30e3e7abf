"""`PerMesh`: an object of another room that lives as long as a mesh, such as its communicators."""

from collections.abc import Callable
from typing import Generic, TypeVar

from ._mesh import Mesh

T = TypeVar("T")


class PerMesh(Generic[T]):
    """Objects of a kind, one a mesh. A closed mesh drops the mesh's object.

    Example:
        >>> from shardfn.core import make_mesh
        >>> counts: PerMesh[list[int]] = PerMesh()
        >>> mesh = make_mesh({"dp": 1}, device="cpu")
        >>> counts.get(mesh), counts.of(mesh, list).append(3), counts.get(mesh)
        (None, None, [3])
    """

    def get(self, mesh: Mesh) -> T | None:
        """Returns the mesh's object, or None."""
        return mesh.resources.get(self)

    def of(self, mesh: Mesh, make: Callable[[], T]) -> T:
        """Returns the mesh's object, made by `make` at the first call."""
        if self not in mesh.resources:
            mesh.resources[self] = make()
        return mesh.resources[self]

    def put(self, mesh: Mesh, value: T) -> T:
        """Replaces the mesh's object, and returns the new object."""
        mesh.resources[self] = value
        return value
