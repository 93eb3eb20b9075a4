"""Error bars for reconstructed images: the linearised deep image prior.

    A = lw.imaging.radon(28, angles=20)
    r = lw.imaging.reconstruct(A, y)
    post = lw.imaging.posterior(r)
    post.mean, post.std, post.sample(100)

Antorán, Barbano, Leuschner, Hernández-Lobato and Jin (2022), "Uncertainty estimation for computed tomography with a
linearised deep image prior".
"""

from lapwing.imaging import files as _files  # noqa: F401  (lw.save and lw.load of what is here)
from lapwing.imaging.filters import blur, fourier
from lapwing.imaging.fitting import ImageEvidence, evidence, posterior
from lapwing.imaging.operator import Operator
from lapwing.imaging.planning import ImagingPlan, plan
from lapwing.imaging.projections import radon
from lapwing.imaging.reconstruction import Reconstruction, reconstruct
from lapwing.imaging.sampled import Effort
from lapwing.imaging.total_variation import psnr, total_variation
from lapwing.imaging.unet import UNet
from lapwing.imaging.value import ImagingPosterior

__all__ = [
    "Effort",
    "ImageEvidence",
    "ImagingPlan",
    "ImagingPosterior",
    "Operator",
    "Reconstruction",
    "UNet",
    "blur",
    "evidence",
    "fourier",
    "plan",
    "posterior",
    "psnr",
    "radon",
    "reconstruct",
    "total_variation",
]
