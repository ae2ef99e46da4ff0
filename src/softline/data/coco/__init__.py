"""Object detection datasets in COCO's format."""
