"""Number formats: elements, scales, codecs and the token blocks of packed documents."""
