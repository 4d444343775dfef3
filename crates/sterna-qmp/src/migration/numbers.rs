//! Parses numbers in QEMU's notation for people: `64M`, `1.5G`, `0x100000`.

/// Parses an integer, decimal or `0x` hexadecimal.
pub fn parse_number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) if hex.bytes().all(|byte| byte.is_ascii_hexdigit()) => u64::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
        None => None,
    }
}

/// Parses a size in bytes. The number is decimal, may have a fraction, and has one of the suffixes B, K, M, G, T, P,
/// E in either case. Without a suffix it counts `unit` bytes. Hexadecimal numbers have no suffix. A fraction of a
/// byte is truncated. A fraction is only valid with a unit larger than a byte.
pub fn parse_size(text: &str, unit: u64) -> Option<u64> {
    if text.starts_with("0x") || text.starts_with("0X") {
        return parse_number(text)?.checked_mul(unit);
    }
    let (digits, unit) = match text.chars().last()? {
        suffix if suffix.is_ascii_alphabetic() => {
            let shift = match suffix.to_ascii_uppercase() {
                'B' => 0,
                'K' => 10,
                'M' => 20,
                'G' => 30,
                'T' => 40,
                'P' => 50,
                'E' => 60,
                _ => return None,
            };
            (&text[..text.len() - 1], 1u64 << shift)
        }
        _ => (text, unit),
    };
    match digits.split_once('.') {
        None if digits.is_empty() => None,
        None => parse_number(digits)?.checked_mul(unit),
        Some((whole, fraction)) => {
            if unit == 1 || whole.is_empty() {
                return None;
            }
            let part = fraction_of(fraction, unit)?;
            parse_number(whole)?.checked_mul(unit)?.checked_add(part)
        }
    }
}

/// `0.fraction * unit`, truncated. Digits after the 18th do not affect a size in bytes.
fn fraction_of(fraction: &str, unit: u64) -> Option<u64> {
    if fraction.is_empty() || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let digits = &fraction[..fraction.len().min(18)];
    let scale = 10u128.pow(u32::try_from(digits.len()).ok()?);
    let part = u128::from(digits.parse::<u64>().ok()?) * u128::from(unit) / scale;
    u64::try_from(part).ok()
}

/// Parses a switch: `on`, `yes`, `true`, `y`, or `off`, `no`, `false`, `n`.
pub(in crate::migration) fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}
