"""The `nmoe` of the source documents: only `nmoe.data`, whose names lead to this project's.

A package `nmoe` of your own, such as a trainer, keeps its modules: what is first on the path is
imported, and modules of the others are found behind it.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
