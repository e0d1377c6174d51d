"""The units of an explanation: patches of images, words of sentences, edges of graphs."""
