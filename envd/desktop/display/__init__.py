"""A guest's screen: RFB, settling, tiles and encodings."""
