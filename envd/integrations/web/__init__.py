"""Record and replay of the web traffic of guests, with mitmproxy and WARC files."""
