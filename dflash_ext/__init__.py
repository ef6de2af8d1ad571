"""dflash_ext: train DFlash block-diffusion drafters with ahead-of-time compiled kernels."""

__version__ = "0.1.0"
