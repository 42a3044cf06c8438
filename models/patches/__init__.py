"""Makes timm's models cheap on XLA: `table` names the patches, the rest is what they swap in."""
