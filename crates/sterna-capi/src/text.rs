//! Texts that the library hands to its caller.

use std::ffi::{CString, c_char};

/// Frees a text that a function of this library returned as `char *`. NULL is allowed.
///
/// Threads: any; each text once.
/// `text` is NULL or such a text, and was not freed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: `new_text` has made it, and the caller gives it back once.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// A copy of a text for the caller. A NUL inside ends the copy.
pub(crate) fn new_text(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_with_a_nul_ends_there() {
        assert_eq!(new_text("a\0b").as_bytes(), b"a");
    }
}
