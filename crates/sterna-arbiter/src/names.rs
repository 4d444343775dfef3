//! Names of guests as names of files and keys.

use crate::claim::random_number;

/// The name with every byte as `%XX` that is no ASCII letter, digit, `-` or `_`: also the point and the slash.
pub(crate) fn encoded(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// A random token that no other one equals: 32 hexadecimal digits.
pub(crate) fn token() -> String {
    format!("{:016x}{:016x}", random_number(), random_number())
}

/// Whether it can be one.
pub(crate) fn is_token(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The beginning of what somebody else wrote, safe to print.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    const MOST: usize = 400;
    let text = String::from_utf8_lossy(bytes);
    let short: String = text.trim().chars().take(MOST).collect();
    let rest = if short.len() < text.trim().len() { "…" } else { "" };
    format!("{short:?}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_names_differ_if_names_do_and_hide_nothing() {
        assert_eq!(encoded("web-1_a"), "web-1_a");
        assert_eq!(encoded("../a b%41"), "%2E%2E%2Fa%20b%2541");
    }

    #[test]
    fn quoted_text_is_short_and_printable() {
        assert_eq!(quoted(b" a\x1b[2J\n"), r#""a\u{1b}[2J""#);
        assert!(quoted(&[b'x'; 5000]).len() < 420);
    }
}
