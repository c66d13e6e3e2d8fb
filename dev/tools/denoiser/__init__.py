"""A small trained denoiser of the host's own UNet: what caches do to images that can be judged."""
