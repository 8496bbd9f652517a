"""Encoder-decoders: an encoder of text or of audio, and a decoder that attends to the encoder's output. The families
are settings of one network (`decodax.models.encoder_decoder.network`)."""
