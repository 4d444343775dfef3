//! The message with which a VMM hands its guest's memory over (specs/uffd.md §2). Pure.
//!
//! It is a JSON array of regions without any framing: the message ends where the array ends.

use serde::Deserialize;

use crate::source::{HUGE_BYTES, PAGE_BYTES};

/// Longest message in bytes.
pub const LONGEST: usize = 64 << 10;
/// Largest number of regions.
pub const MOST_REGIONS: usize = 1024;

/// One region of the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Address of the region in the VMM.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Place of the region in the guest's memory, in bytes.
    pub offset: u64,
}

/// The guest's memory as the VMM describes it. The regions are in the order of their offsets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handshake {
    /// The regions, of which no two overlap.
    pub regions: Vec<Region>,
    /// Length of a page of all regions: 4096 or 2097152.
    pub page_bytes: u64,
}

/// The message breaks a rule. The guest cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The message is no array of regions.
    #[error(
        "its message is no list of memory regions: {why}; connect only a VMM's memory backend `Uffd` here"
    )]
    Garbage {
        /// The rule that the message breaks, with line and column.
        why: String,
    },
    /// The message does not end.
    #[error(
        "its message has more than {LONGEST} bytes without an end; connect only a VMM's memory backend `Uffd` here"
    )]
    TooLong,
    /// The message has no region, or more than [`MOST_REGIONS`].
    #[error("it sent {count} memory regions, but 1 to {MOST_REGIONS} are possible")]
    Count {
        /// Number of regions.
        count: usize,
    },
    /// A region has no page size, or two different ones.
    #[error(
        "region {region} has the page sizes {sizes:?}, but one is needed, in bytes (page_size or page_size_kib)"
    )]
    NoPageSize {
        /// Index of the region.
        region: usize,
        /// The page sizes of the message.
        sizes: Vec<u64>,
    },
    /// Pages have a size that is not served.
    #[error(
        "region {region} has pages of {bytes} bytes, but 4096 or 2097152 are served: configure the VMM for pages of one of \
         these sizes"
    )]
    PageSize {
        /// Index of the region.
        region: usize,
        /// The page size.
        bytes: u64,
    },
    /// Two regions have different page sizes.
    #[error("region {region} has pages of {bytes} bytes, but region 0 has pages of {first} bytes")]
    MixedPages {
        /// Index of the region.
        region: usize,
        /// Its page size.
        bytes: u64,
        /// The page size of region 0.
        first: u64,
    },
    /// A number of a region is no multiple of the page size, is too large, or is 0.
    #[error("region {region} has {field} {value:#x}, which {rule}")]
    Number {
        /// Index of the region.
        region: usize,
        /// Name of the number in the message.
        field: &'static str,
        /// The number.
        value: u64,
        /// The broken rule, as the rest of a sentence.
        rule: &'static str,
    },
    /// Two regions share addresses.
    #[error("the regions at the offsets {first:#x} and {second:#x} overlap at address {address:#x}")]
    Overlap {
        /// Offset of the one region.
        first: u64,
        /// Offset of the other region.
        second: u64,
        /// The first shared address.
        address: u64,
    },
    /// The regions leave a part of the memory out, or share one.
    #[error(
        "its regions cover {found:#x} where a region must begin at {expected:#x}: the guest was not restored from the \
         snapshot of this image"
    )]
    Offsets {
        /// Where the next region must begin.
        expected: u64,
        /// Where it begins.
        found: u64,
    },
    /// The regions have another length than the image's memory.
    #[error(
        "its regions have {regions} bytes, but the image has {image} bytes of memory: restore the guest from the snapshot \
         of this image, or serve the image of its snapshot"
    )]
    OtherMemory {
        /// Bytes of all regions.
        regions: u64,
        /// Bytes of the image's memory.
        image: u64,
    },
    /// The connection closed before the message was complete.
    #[error("it closed its connection after {bytes} bytes of its message")]
    Closed {
        /// Number of received bytes.
        bytes: usize,
    },
    /// The message did not arrive in time.
    #[error("its message was not complete after {seconds} s ({bytes} bytes arrived)")]
    Late {
        /// The limit in seconds.
        seconds: u64,
        /// Number of received bytes.
        bytes: usize,
    },
    /// The message has no descriptor, or several.
    #[error("it sent {count} descriptors with its memory regions, but the userfaultfd alone is needed")]
    Descriptors {
        /// Number of descriptors that arrived; all are closed.
        count: usize,
    },
    /// The descriptor is of another kind.
    #[error("it sent the descriptor of `{found}`, but a userfaultfd is needed")]
    NoUserfaultfd {
        /// What the kernel calls the descriptor's file.
        found: String,
    },
}

#[derive(Deserialize)]
struct Message {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: Option<u64>,
    /// In bytes too, in spite of its name. Older VMMs send only this one.
    page_size_kib: Option<u64>,
}

/// Decodes a message as far as it has arrived. `None`: more bytes must come.
///
/// # Errors
/// [`HandshakeError`] with the rule that the message breaks.
pub fn decode(message: &[u8]) -> Result<Option<Handshake>, HandshakeError> {
    let decoded = match serde_json::from_slice::<Vec<Message>>(message) {
        Ok(decoded) => decoded,
        Err(error) if error.is_eof() && message.len() < LONGEST => return Ok(None),
        Err(error) if error.is_eof() => return Err(HandshakeError::TooLong),
        Err(error) => return Err(HandshakeError::Garbage { why: error.to_string() }),
    };
    if decoded.is_empty() || decoded.len() > MOST_REGIONS {
        return Err(HandshakeError::Count { count: decoded.len() });
    }
    let mut page_bytes = 0;
    let mut regions = Vec::with_capacity(decoded.len());
    for (region, message) in decoded.iter().enumerate() {
        let bytes = page_size(region, message)?;
        if region == 0 {
            page_bytes = bytes;
        }
        if bytes != page_bytes {
            return Err(HandshakeError::MixedPages { region, bytes, first: page_bytes });
        }
        check_numbers(region, message, bytes)?;
        regions.push(Region {
            address: message.base_host_virt_addr,
            bytes: message.size,
            offset: message.offset,
        });
    }
    check_addresses(&mut regions)?;
    regions.sort_by_key(|region| region.offset);
    Ok(Some(Handshake { regions, page_bytes }))
}

impl Handshake {
    /// Checks that the regions are a memory of `image_bytes` bytes without a gap.
    ///
    /// # Errors
    /// [`HandshakeError::OtherMemory`], [`HandshakeError::Offsets`].
    pub fn check(&self, image_bytes: u64) -> Result<(), HandshakeError> {
        let regions = self.regions.iter().fold(0u64, |sum, region| sum.saturating_add(region.bytes));
        if regions != image_bytes {
            return Err(HandshakeError::OtherMemory { regions, image: image_bytes });
        }
        let mut expected = 0;
        for region in &self.regions {
            if region.offset != expected {
                return Err(HandshakeError::Offsets { expected, found: region.offset });
            }
            // The sum of all lengths is the image's length, so it does not overflow.
            expected += region.bytes;
        }
        Ok(())
    }
}

fn page_size(region: usize, message: &Message) -> Result<u64, HandshakeError> {
    let bytes = match (message.page_size, message.page_size_kib) {
        (Some(one), Some(other)) if one != other => {
            return Err(HandshakeError::NoPageSize { region, sizes: vec![one, other] });
        }
        (Some(bytes), _) | (None, Some(bytes)) => bytes,
        (None, None) => return Err(HandshakeError::NoPageSize { region, sizes: Vec::new() }),
    };
    if bytes == PAGE_BYTES || bytes == HUGE_BYTES {
        Ok(bytes)
    } else {
        Err(HandshakeError::PageSize { region, bytes })
    }
}

fn check_numbers(region: usize, message: &Message, page_bytes: u64) -> Result<(), HandshakeError> {
    let fields = [
        ("base_host_virt_addr", message.base_host_virt_addr),
        ("size", message.size),
        ("offset", message.offset),
    ];
    for (field, value) in fields {
        if !value.is_multiple_of(page_bytes) {
            return Err(HandshakeError::Number {
                region,
                field,
                value,
                rule: "is no multiple of its page size",
            });
        }
    }
    let (field, value) = ("size", message.size);
    if value == 0 {
        return Err(HandshakeError::Number { region, field, value, rule: "is empty" });
    }
    let fits = message.base_host_virt_addr.checked_add(value).is_some()
        && message.offset.checked_add(value).is_some();
    if !fits {
        let rule = "reaches beyond the largest address or offset";
        return Err(HandshakeError::Number { region, field, value, rule });
    }
    Ok(())
}

/// Sorts the regions by address, and checks that no two overlap.
fn check_addresses(regions: &mut [Region]) -> Result<(), HandshakeError> {
    regions.sort_by_key(|region| region.address);
    for pair in regions.windows(2) {
        if pair[0].address + pair[0].bytes > pair[1].address {
            let (first, second) = (pair[0].offset, pair[1].offset);
            return Err(HandshakeError::Overlap { first, second, address: pair[1].address });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn region(address: u64, bytes: u64, offset: u64, page: u64) -> String {
        format!(
            r#"{{"base_host_virt_addr":{address},"size":{bytes},"offset":{offset},"page_size":{page},"page_size_kib":{page}}}"#
        )
    }

    fn refused(message: &str) -> HandshakeError {
        decode(message.as_bytes()).unwrap_err()
    }

    /// The message that Firecracker 1.17 sends for a guest of 256 MiB.
    #[test]
    fn message_of_firecracker_is_decoded() {
        let message = br#"[{"base_host_virt_addr":140086263939072,"size":268435456,"offset":0,"page_size":4096,"page_size_kib":4096}]"#;

        let handshake = decode(message).unwrap().unwrap();

        assert_eq!(handshake.page_bytes, 4096);
        let region = Region { address: 140_086_263_939_072, bytes: 256 * MIB, offset: 0 };
        assert_eq!(handshake.regions, [region]);
        assert_eq!(handshake.check(256 * MIB), Ok(()));
        let other = HandshakeError::OtherMemory { regions: 256 * MIB, image: 255 * MIB };
        assert_eq!(handshake.check(255 * MIB), Err(other));
        for length in 0..message.len() {
            assert_eq!(decode(&message[..length]), Ok(None), "the first {length} bytes");
        }
    }

    #[test]
    fn older_message_has_its_page_size_in_one_field_only() {
        let message =
            br#"[{"base_host_virt_addr":2097152,"size":2097152,"offset":0,"page_size_kib":2097152}]"#;

        assert_eq!(decode(message).unwrap().unwrap().page_bytes, 2 * MIB);
    }

    #[test]
    fn regions_are_sorted_by_their_offsets() {
        let message =
            format!("[{},{}]", region(8 * MIB, MIB, 2 * MIB, 4096), region(64 * MIB, 2 * MIB, 0, 4096));

        let handshake = decode(message.as_bytes()).unwrap().unwrap();

        assert_eq!(handshake.regions[0].address, 64 * MIB);
        assert_eq!(handshake.check(3 * MIB), Ok(()));
    }

    #[test]
    fn message_that_breaks_a_rule_is_refused_with_the_rule() {
        use HandshakeError as E;
        assert!(matches!(refused("GET / HTTP/1.1\r\n"), E::Garbage { .. }));
        assert!(matches!(refused("[1]"), E::Garbage { .. }));
        assert!(matches!(refused("[]x"), E::Garbage { .. }));
        assert!(matches!(refused("[]"), E::Count { count: 0 }));
        let no_page = r#"[{"base_host_virt_addr":0,"size":4096,"offset":0}]"#;
        assert!(matches!(refused(no_page), E::NoPageSize { region: 0, .. }));
        let two = r#"[{"base_host_virt_addr":0,"size":4096,"offset":0,"page_size":4096,"page_size_kib":4}]"#;
        assert_eq!(refused(two), E::NoPageSize { region: 0, sizes: vec![4096, 4] });
        let list = |regions: &[String]| refused(&format!("[{}]", regions.join(",")));
        assert!(matches!(list(&[region(0, 4096, 0, 16384)]), E::PageSize { bytes: 16384, .. }));
        let mixed = [region(0, 2 * MIB, 0, 4096), region(4 * MIB, 2 * MIB, 2 * MIB, 2 * MIB)];
        assert!(matches!(list(&mixed), E::MixedPages { region: 1, .. }));
        assert!(
            matches!(list(&[region(4096, 2 * MIB, 0, 2 * MIB)]), E::Number { field, .. } if field == "base_host_virt_addr")
        );
        assert!(matches!(list(&[region(0, 0, 0, 4096)]), E::Number { rule: "is empty", .. }));
        let beyond = region(u64::MAX - 4095, 8192, 0, 4096);
        assert!(matches!(list(&[beyond]), E::Number { field: "size", .. }));
        let overlap = [region(0, 8192, 0, 4096), region(4096, 4096, 8192, 4096)];
        assert_eq!(list(&overlap), E::Overlap { first: 0, second: 8192, address: 4096 });
        let many = vec![region(0, 4096, 0, 4096); MOST_REGIONS + 1];
        assert!(matches!(list(&many), E::TooLong | E::Count { .. }));
    }

    #[test]
    fn memory_with_a_gap_is_not_the_images() {
        let message = format!("[{},{}]", region(0, MIB, 0, 4096), region(MIB, MIB, 2 * MIB, 4096));
        let handshake = decode(message.as_bytes()).unwrap().unwrap();

        let gap = HandshakeError::Offsets { expected: MIB, found: 2 * MIB };
        assert_eq!(handshake.check(2 * MIB), Err(gap));
    }

    #[test]
    fn message_without_an_end_is_refused_at_the_limit() {
        let blank = vec![b' '; LONGEST];

        assert_eq!(decode(&blank[..LONGEST - 1]), Ok(None));
        assert_eq!(decode(&blank), Err(HandshakeError::TooLong));
    }
}
