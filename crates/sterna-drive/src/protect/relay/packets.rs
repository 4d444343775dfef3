//! Counts the SYNCs on one of QEMU's multifd channels after CHECKPOINT_READY (`specs/stream.md` §3.3, §3.4).
//! Decodes no more than needed for this. Pure. The standby checks the content.

use sterna_wire::multifd::{PacketHeader, PacketKind, RAM_PACKET_BYTES};

use super::heads::{Heads, MOST_HEAD_BYTES};

/// Decoder of one channel's packets.
#[derive(Debug, Default)]
pub(super) struct Packets {
    heads: Heads,
    /// The packet whose body is being skipped is a SYNC.
    is_sync: bool,
}

impl Packets {
    /// Decodes more bytes. Returns how many SYNCs, with their payload, are complete with these bytes.
    ///
    /// # Errors
    /// The unexpected byte. The rest of the channel cannot be decoded.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<u64, String> {
        let mut syncs = 0;
        loop {
            // A packet is complete when its whole body was skipped.
            if self.heads.is_skipped(&mut bytes) && std::mem::take(&mut self.is_sync) {
                syncs += 1;
            }
            let Some(head) = self.heads.next(&mut bytes, MOST_HEAD_BYTES) else { return Ok(syncs) };
            let (rest, is_sync) = read(&head)?;
            self.heads.skip(rest);
            self.is_sync = is_sync;
        }
    }
}

/// Number of bytes of the packet that follow the head, and whether it is a SYNC.
fn read(head: &[u8; MOST_HEAD_BYTES]) -> Result<(u64, bool), String> {
    let header = PacketHeader::peek(head).map_err(|error| error.to_string())?;
    let Some(PacketHeader { kind: PacketKind::Ram { sync, .. } }) = header else {
        return Err("a device's packet arrived inside a checkpoint".to_owned());
    };
    let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    // A packet without pages has no payload, independent of its length field.
    let payload = if word(16) == 0 { 0 } else { u64::from(word(20)) };
    Ok(((RAM_PACKET_BYTES - MOST_HEAD_BYTES) as u64 + payload, sync))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A packet of `pages` pages, or a SYNC.
    pub(in super::super) fn packet(is_sync: bool, pages: u32) -> Vec<u8> {
        let words = [0x1122_3344, 1, u32::from(is_sync), 128, pages, if is_sync { 77 } else { pages * 4096 }];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word: &u32| word.to_be_bytes()).collect();
        bytes.resize(RAM_PACKET_BYTES, 0);
        bytes.extend(std::iter::repeat_n(0x11, pages as usize * 4096));
        bytes
    }

    #[test]
    fn syncs_are_counted_however_the_bytes_come() {
        let stream =
            [packet(false, 2), packet(true, 0), packet(true, 0), packet(false, 1), packet(true, 0)].concat();
        for size in [1, 13, 4096, stream.len()] {
            let mut packets = Packets::default();
            let syncs: u64 = stream.chunks(size).map(|piece| packets.push(piece).unwrap()).sum();
            assert_eq!(syncs, 3, "{size}");
        }
        let mut packets = Packets::default();
        let (last, all) = stream.split_last().unwrap();
        assert_eq!(
            (packets.push(all).unwrap(), packets.push(&[*last]).unwrap()),
            (2, 1),
            "with its last byte"
        );
    }

    #[test]
    fn other_packets_are_refused() {
        let mut wrong = packet(false, 0);
        wrong[0] = 0;
        assert!(Packets::default().push(&wrong).is_err());
        let mut of_device = packet(false, 0);
        of_device[11] = 0x40;
        assert!(Packets::default().push(&of_device).is_err());
    }
}
