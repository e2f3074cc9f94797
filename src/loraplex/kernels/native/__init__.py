"""C++ sources of the native CPU operations and how they are built and called."""

from loraplex.kernels.native.build import NativeUnavailable, load_library

__all__ = ["NativeUnavailable", "load_library"]
