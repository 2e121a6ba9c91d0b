"""The program that runs inside guests. Nothing else in envd imports it: it is copied into images as one file."""
