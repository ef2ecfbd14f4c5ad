"""From trained networks to integers, ONNX files and the proof that both agree."""

from qat.deploy.convert import convert
from qat.deploy.export import export_onnx
from qat.deploy.verify import ParityReport, verify

__all__ = ["ParityReport", "convert", "export_onnx", "verify"]
