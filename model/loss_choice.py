"""The loss that a configuration names."""

from config.loss import loss_implementation
from config.schema import Config
from model.loss import HeadLoss
from model.loss_chunked import RowChunked, VocabularyChunked
from model.loss_liger import LigerCrossEntropy, LigerFusedLinear


def loss_of(config: Config) -> HeadLoss:
    """A new one, for one head."""
    section, name = config.loss, loss_implementation(config)
    options = {"soft_cap": section.soft_cap, "z_loss_coeff": section.z_loss_coeff}
    if name == "row_chunked":
        return RowChunked(section.rows_per_chunk, **options)
    if name == "vocab_chunked":
        return VocabularyChunked(section.columns_per_chunk, **options)
    kinds = {"torch": HeadLoss, "liger_cross_entropy": LigerCrossEntropy, "liger_fused_linear": LigerFusedLinear}
    return kinds[name](**options)
