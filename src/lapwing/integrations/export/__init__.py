"""A posterior's predictions as one file that runs without Lapwing: torch.export or ONNX."""

from lapwing.integrations.export.front import export

__all__ = ["export"]
