//! The stored form of a claim: lines of text with a checksum.
//!
//! The checksum detects records that are incomplete or written by another program.
//!
//! ```text
//! sterna-claim 1
//! guest web-1
//! generation 3
//! winner standby host-b:4711:9d2c5680f1a3b7e4
//! crc32 89abcdef
//! ```

use crate::claim::{Claim, Claimant, Generation, GuestName, Role};
use crate::names::quoted;

const MAGIC: &str = "sterna-claim ";
const VERSION: &str = "1";
/// Limit of a record's length; the longest valid record is shorter.
pub(crate) const MOST_BYTES: usize = 1024;

/// Encodes the record of a winning claim.
pub(crate) fn encode(claim: &Claim) -> String {
    text(&claim.guest, claim.generation, &claim.claimant)
}

/// Decodes the winner. The error text says what is wrong with the record.
pub(crate) fn decode(bytes: &[u8], guest: &GuestName, generation: Generation) -> Result<Claimant, String> {
    let told = || quoted(bytes);
    if bytes.is_empty() {
        return Err("the stored claim is empty".to_owned());
    }
    let whole = std::str::from_utf8(bytes).ok().filter(|text| text.starts_with(MAGIC));
    let Some(whole) = whole else {
        return Err(format!("the stored data is not a claim of Sterna: {}", told()));
    };
    let version = whole[MAGIC.len()..].lines().next().unwrap_or_default();
    if whole.contains('\n') && version != VERSION {
        let version = quoted(version.as_bytes());
        return Err(format!(
            "the stored claim has format version {version}, but this Sterna supports only {VERSION}"
        ));
    }
    let winner = whole.lines().find_map(|line| line.strip_prefix("winner ")).and_then(claimant);
    let Some(winner) = winner else { return Err(format!("the stored claim is truncated: {}", told())) };
    if text(guest, generation, &winner) == whole {
        return Ok(winner);
    }
    match whole.rsplit_once("crc32 ") {
        Some((before, _)) if with_checksum(before.to_owned()) == whole => {
            Err(format!("the stored claim is for another guest or generation: {}", told()))
        }
        _ => Err(format!("the stored claim is truncated or changed: {}", told())),
    }
}

fn text(guest: &GuestName, generation: Generation, winner: &Claimant) -> String {
    with_checksum(format!("{MAGIC}{VERSION}\nguest {guest}\ngeneration {generation}\nwinner {winner}\n"))
}

fn with_checksum(text: String) -> String {
    let sum = crc32fast::hash(text.as_bytes());
    format!("{text}crc32 {sum:08x}\n")
}

fn claimant(line: &str) -> Option<Claimant> {
    let (role, process) = line.split_once(' ')?;
    Claimant::new(Role::of_word(role)?, process).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim() -> Claim {
        Claim {
            guest: GuestName::new("guest a").expect("a name"),
            generation: Generation::new(7),
            claimant: Claimant::new(Role::Standby, "host b:1").expect("a name"),
        }
    }

    fn read(bytes: &[u8]) -> Result<Claimant, String> {
        decode(bytes, &claim().guest, claim().generation)
    }

    #[test]
    fn format_is_that_of_version_0_1() {
        let text = "sterna-claim 1\nguest guest a\ngeneration 7\n\
                    winner standby host b:1\ncrc32 2053489c\n";

        assert_eq!(encode(&claim()), text);
    }

    #[test]
    fn records_are_read_again() {
        assert_eq!(read(encode(&claim()).as_bytes()), Ok(claim().claimant));
    }

    #[test]
    fn the_longest_record_has_room() {
        let claim = Claim {
            guest: GuestName::new("g".repeat(64)).expect("a name"),
            claimant: Claimant::new(Role::Primary, "p".repeat(128)).expect("a name"),
            ..claim()
        };

        assert!(encode(&claim).len() < MOST_BYTES);
    }

    #[test]
    fn no_cut_and_no_changed_byte_is_taken_for_a_claim() {
        let whole = encode(&claim()).into_bytes();
        for length in 0..whole.len() {
            assert!(read(&whole[..length]).is_err(), "cut at {length}");
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut changed = whole.clone();
                changed[at] ^= 1 << bit;
                assert!(read(&changed).is_err(), "byte {at}, bit {bit}");
            }
        }
        assert!(read(&[&whole[..], b"\n"].concat()).is_err());
    }

    #[test]
    fn what_is_wrong_is_said() {
        let of_another = encode(&Claim { generation: Generation::new(8), ..claim() });
        let newer = encode(&claim()).replace("claim 1", "claim 2");

        for (bytes, what) in [
            (&b""[..], "empty"),
            (b"hello\n", "not a claim of Sterna"),
            (b"\xff\xfe", "not a claim of Sterna"),
            (of_another.as_bytes(), "another guest or generation"),
            (newer.as_bytes(), "format version"),
            (&encode(&claim()).as_bytes()[..30], "truncated"),
        ] {
            let error = read(bytes).expect_err("refused");
            assert!(error.contains(what), "{error}");
        }
    }
}
