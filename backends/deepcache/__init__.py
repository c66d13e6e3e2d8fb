"""DeepCache: the deep features of a UNet kept over neighbouring steps (Ma et al., CVPR 2024)."""
