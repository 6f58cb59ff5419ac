"""What a sequence leaves behind for its next token: window ring, compressed keys, open groups, last ids."""
