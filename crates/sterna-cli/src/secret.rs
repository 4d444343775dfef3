//! `--secret FILE`: the key that only the two sides of a protection know.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sterna_standby::Secret;

use crate::exit::Stop;
use crate::terminal;

const BYTES: usize = 32;

/// Reads 32 bytes, or 64 hexadecimal digits with or without a line end.
pub fn read(path: &Path) -> Result<Secret, Stop> {
    let cannot = |error| Stop::cannot_read(path, &error);
    let bytes = std::fs::read(path).map_err(cannot)?;
    if std::fs::metadata(path).map_err(cannot)?.mode() & 0o077 != 0 {
        terminal::note(&format!(
            "sterna: warning: other users than its owner may read {}: set its mode with `chmod 600`",
            path.display()
        ));
    }
    secret(&bytes).map(Secret::from_bytes).ok_or_else(|| {
        Stop::unreadable(format!(
            "{} does not contain a secret: it must have 32 bytes, or 64 hexadecimal digits as `openssl rand -hex 32` \
             prints",
            path.display()
        ))
    })
}

fn secret(bytes: &[u8]) -> Option<[u8; BYTES]> {
    if let Ok(raw) = bytes.try_into() {
        return Some(raw);
    }
    let text = std::str::from_utf8(bytes).ok()?.trim_end();
    if text.len() != 2 * BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut secret = [0; BYTES];
    for (byte, digits) in secret.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_is_raw_or_in_digits() {
        assert_eq!(secret(&[7; 32]), Some([7; 32]));
        assert_eq!(secret("0a".repeat(32).as_bytes()), Some([10; 32]));
        assert_eq!(secret(format!("{}\n", "0A".repeat(32)).as_bytes()), Some([10; 32]));
        for wrong in ["", "0a", &"0g".repeat(32), &"+1".repeat(32), &"0a".repeat(33)] {
            assert_eq!(secret(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(secret(&[0xff; 64]), None);
    }
}
