"""News with wrong labels and a pretrained text model: fine-tuned, or a linear classifier of its frozen embeddings."""
