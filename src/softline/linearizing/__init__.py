"""Pretrained vision transformers with linear attention: transfer, fine-tuning, measurements."""
