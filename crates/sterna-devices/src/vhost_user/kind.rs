//! What a guest sees of a device: its kind, which of the back end's features a driver may take, and its configuration space.

/// Number of bytes of a file system's name in its configuration space.
const TAG_BYTES: usize = 36;
/// Of the configuration spaces as VIRTIO 1.2 has them, without the fields of features that are not offered.
const FILE_SYSTEM_BYTES: usize = TAG_BYTES + 4;
const BLOCK_BYTES: usize = 60;
const NETWORK_BYTES: usize = 12;
/// Where a disk's configuration has the size of a block, u32, and the number of queues, u16.
const BLOCK_SIZE_AT: usize = 20;
const BLOCK_QUEUES_AT: usize = 34;

/// Indirect descriptors, event indexes, VIRTIO 1: what any driver may take, if the back end has it. Not offered is what concerns
/// the transport (notification data, resetting one queue) or other rings than split ones.
const COMMON: u64 = 1 << 28 | 1 << 29 | VERSION_1;
const VERSION_1: u64 = 1 << 32;
/// Sizes, read-only, flushing, topology, several queues, discarding and writing zeros. Not a write cache that the driver switches:
/// nobody can write the configuration space.
const BLOCK: u64 =
    1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | BLOCK_SIZE | 1 << 9 | 1 << 10 | BLOCK_QUEUES | 1 << 13 | 1 << 14;
const BLOCK_SIZE: u64 = 1 << 6;
const BLOCK_QUEUES: u64 = 1 << 12;
/// Checksums and segments in either direction, the address, mergeable buffers. Nothing that needs a control queue, since its
/// commands would be for the VMM.
const NETWORK: u64 = 0b11 | NETWORK_MAC | 0b1111 << 7 | 0b1111 << 11 | 1 << 15;
const NETWORK_MAC: u64 = 1 << 5;

/// A kind of device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceKind {
    /// virtio-fs. Its first queue is the one for urgent requests, and the others are for requests.
    FileSystem {
        /// The name that the guest mounts it by: 1 to 36 bytes. Without one the back end must say it.
        tag: Option<String>,
    },
    /// virtio-blk.
    Block,
    /// virtio-net with one pair of queues.
    Network {
        /// Its address. Without one the back end must say it.
        mac: Option<[u8; 6]>,
    },
}

impl DeviceKind {
    /// As an operator writes it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::FileSystem { .. } => "fs",
            Self::Block => "blk",
            Self::Network { .. } => "net",
        }
    }

    /// Virtio's number of it.
    pub fn virtio_id(&self) -> u32 {
        match self {
            Self::Network { .. } => 1,
            Self::Block => 2,
            Self::FileSystem { .. } => 26,
        }
    }

    /// A device with so many queues for requests, or pairs of queues, has so many in all.
    pub fn queues(&self, of_requests: usize) -> usize {
        match self {
            Self::Block => of_requests,
            Self::FileSystem { .. } => of_requests + 1,
            Self::Network { .. } => 2 * of_requests,
        }
    }

    /// Whether a back end of the kind has a state that only it knows. A disk's back end has none but its rings; what a
    /// network's has, it moves if it can.
    pub(super) fn needs_state(&self) -> bool {
        matches!(self, Self::FileSystem { .. })
    }

    /// Whether whatever a driver makes available is a request that is answered. A card keeps buffers for packets that may never
    /// come.
    pub(super) fn answers_all(&self) -> bool {
        !matches!(self, Self::Network { .. })
    }

    /// Which of the back end's features a driver may take.
    pub(super) fn features(&self, of_back_end: u64) -> Result<u64, String> {
        if of_back_end & VERSION_1 == 0 {
            return Err("VIRTIO_F_VERSION_1".to_owned());
        }
        let of_kind = match self {
            Self::FileSystem { .. } => 0,
            Self::Block => BLOCK,
            Self::Network { .. } => NETWORK,
        };
        Ok(of_back_end & (COMMON | of_kind) | self.features_of_front_end())
    }

    /// Which of them concern the configuration space alone, so that a back end need neither offer nor get them: both sides of a
    /// migration may have back ends that differ there.
    pub(super) fn features_of_front_end(&self) -> u64 {
        if matches!(self, Self::Network { .. }) { NETWORK_MAC } else { 0 }
    }

    /// Of the configuration space, in bytes.
    pub(super) fn space_bytes(&self) -> usize {
        match self {
            Self::FileSystem { .. } => FILE_SYSTEM_BYTES,
            Self::Block => BLOCK_BYTES,
            Self::Network { .. } => NETWORK_BYTES,
        }
    }

    /// The configuration space of a device with so many queues: what the back end says, checked, and what the operator says.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn space(
        &self,
        queues: usize,
        said: Option<Vec<u8>>,
        features: u64,
    ) -> Result<Vec<u8>, String> {
        let is_said = said.is_some();
        let mut space = said.unwrap_or_else(|| vec![0; self.space_bytes()]);
        if space.len() != self.space_bytes() {
            return Err(format!(
                "{} bytes of configuration, {} were asked for",
                space.len(),
                self.space_bytes()
            ));
        }
        match self {
            Self::FileSystem { tag } => {
                if let Some(tag) = tag {
                    let bytes = tag.as_bytes();
                    if bytes.is_empty() || bytes.len() > TAG_BYTES || bytes.contains(&0) {
                        return Err(format!(
                            "`{tag}` is no tag: it has 1 to {TAG_BYTES} bytes, none of them zero"
                        ));
                    }
                    space[..TAG_BYTES].fill(0);
                    space[..bytes.len()].copy_from_slice(bytes);
                }
                let length = space[..TAG_BYTES].iter().position(|byte| *byte == 0).unwrap_or(TAG_BYTES);
                if length == 0 {
                    return Err(
                        "the back end does not say the file system's tag; state it (`tag=NAME`)".to_owned()
                    );
                }
                if std::str::from_utf8(&space[..length]).is_err()
                    || space[length..TAG_BYTES].iter().any(|b| *b != 0)
                {
                    return Err("the file system's tag is not text that ends in zeros".to_owned());
                }
                let request_queues = queues.saturating_sub(1) as u32;
                let theirs = word(&space, TAG_BYTES);
                if is_said && theirs < request_queues {
                    return Err(format!(
                        "the configuration has {theirs} request queues, {request_queues} are wanted"
                    ));
                }
                space[TAG_BYTES..].copy_from_slice(&request_queues.to_le_bytes());
            }
            Self::Block => {
                if !is_said {
                    return Err(
                        "the back end does not say how large the disk is; use one that has CONFIG".to_owned()
                    );
                }
                let size = word(&space, BLOCK_SIZE_AT);
                if features & BLOCK_SIZE != 0 && !(size.is_power_of_two() && (512..=1 << 20).contains(&size))
                {
                    return Err(format!("{size} bytes are no size of a disk's block"));
                }
                let theirs =
                    usize::from(u16::from_le_bytes([space[BLOCK_QUEUES_AT], space[BLOCK_QUEUES_AT + 1]]));
                let theirs = if features & BLOCK_QUEUES == 0 { 1 } else { theirs };
                if theirs < queues {
                    return Err(format!("the configuration has {theirs} queues, {queues} are wanted"));
                }
                space[BLOCK_QUEUES_AT..BLOCK_QUEUES_AT + 2].copy_from_slice(&(queues as u16).to_le_bytes());
            }
            Self::Network { mac } => {
                if let Some(mac) = mac {
                    space[..6].copy_from_slice(mac);
                }
                if space[..6] == [0; 6] || space[0] & 1 == 1 {
                    return Err(
                        "the back end does not say the card's address; state it (`mac=ADDRESS`)".to_owned()
                    );
                }
                // Of features that are not offered.
                space[6..].fill(0);
            }
        }
        Ok(space)
    }
}

fn word(space: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([space[at], space[at + 1], space[at + 2], space[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEATURES: u64 = u64::MAX;

    fn fs(tag: Option<&str>) -> DeviceKind {
        DeviceKind::FileSystem { tag: tag.map(str::to_owned) }
    }

    fn refusal(kind: &DeviceKind, queues: usize, said: Option<Vec<u8>>) -> String {
        kind.space(queues, said, FEATURES).expect_err("it is wrong")
    }

    #[test]
    fn space_of_a_file_system_has_its_tag_and_request_queues() {
        let space = fs(Some("share")).space(3, None, FEATURES).expect("a space");

        assert_eq!((&space[..6], space.len()), (&b"share\0"[..], 40));
        assert_eq!(space[36..], 2u32.to_le_bytes());
        let mut said = vec![0; 40];
        said[..5].copy_from_slice(b"their");
        said[36] = 1;
        assert_eq!(fs(None).space(2, Some(said.clone()), FEATURES).expect("a space"), said);
        assert_eq!(fs(Some("ours")).space(2, Some(said), FEATURES).expect("a space")[..6], *b"ours\0\0");
    }

    #[test]
    fn space_of_a_disk_has_the_queues_that_it_has_here() {
        let mut said = vec![7; BLOCK_BYTES];
        said[BLOCK_SIZE_AT..BLOCK_SIZE_AT + 4].copy_from_slice(&4096u32.to_le_bytes());

        let space = DeviceKind::Block.space(3, Some(said.clone()), FEATURES).expect("a space");

        assert_eq!(space[BLOCK_QUEUES_AT..BLOCK_QUEUES_AT + 2], [3, 0]);
        assert_eq!((&space[..34], &space[36..]), (&said[..34], &said[36..]));
    }

    #[test]
    fn space_of_a_card_has_its_address_and_nothing_of_what_is_not_offered() {
        let card = |mac| DeviceKind::Network { mac };
        let said = [&[2, 0, 0, 0, 0, 9][..], &[1; 6]].concat();

        assert_eq!(
            card(None).space(2, Some(said), FEATURES).expect("a space"),
            [2, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(card(Some([2; 6])).space(2, None, FEATURES).expect("a space")[..6], [2; 6]);
        assert_eq!(card(None).features(VERSION_1).expect("features"), VERSION_1 | NETWORK_MAC);
    }

    #[test]
    fn space_that_breaks_a_rule_is_refused_with_it() {
        let block = |size: u32, queues: u16| {
            let mut said = vec![0; BLOCK_BYTES];
            said[BLOCK_SIZE_AT..BLOCK_SIZE_AT + 4].copy_from_slice(&size.to_le_bytes());
            said[BLOCK_QUEUES_AT..BLOCK_QUEUES_AT + 2].copy_from_slice(&queues.to_le_bytes());
            Some(said)
        };
        let tag = |bytes: &[u8], queues: u8| {
            let mut said = vec![0; FILE_SYSTEM_BYTES];
            said[..bytes.len()].copy_from_slice(bytes);
            said[TAG_BYTES] = queues;
            Some(said)
        };
        let card = DeviceKind::Network { mac: None };
        for (why, says) in [
            (refusal(&fs(None), 2, None), "state it (`tag=NAME`)"),
            (refusal(&fs(Some("")), 2, None), "1 to 36 bytes"),
            (refusal(&fs(Some(&"x".repeat(37))), 2, None), "1 to 36 bytes"),
            (refusal(&fs(None), 2, tag(b"", 1)), "tag=NAME"),
            (refusal(&fs(None), 2, tag(b"a\0b", 1)), "ends in zeros"),
            (refusal(&fs(None), 2, tag(b"\xff", 1)), "is not text"),
            (refusal(&fs(None), 3, tag(b"a", 1)), "1 request queues, 2 are wanted"),
            (refusal(&DeviceKind::Block, 1, None), "how large"),
            (refusal(&DeviceKind::Block, 1, block(0, 1)), "0 bytes"),
            (refusal(&DeviceKind::Block, 1, block(513, 1)), "513 bytes"),
            (refusal(&DeviceKind::Block, 1, block(512, 0)), "0 queues, 1 are wanted"),
            (refusal(&DeviceKind::Block, 1, Some(vec![0; 59])), "59 bytes"),
            (refusal(&card, 2, Some(vec![0; 12])), "mac=ADDRESS"),
            (refusal(&card, 2, Some(vec![1; 12])), "mac=ADDRESS"),
        ] {
            assert!(why.contains(says), "{why}");
        }
        assert!(fs(None).features(1 << 30).is_err());
    }

    #[test]
    fn features_that_concern_the_transport_are_not_offered() {
        for kind in [fs(None), DeviceKind::Block, DeviceKind::Network { mac: None }] {
            let offered = kind.features(u64::MAX).expect("features");
            // Protocol features and the log, packed rings, notification data, the reset of one queue.
            assert_eq!(offered & (1 << 26 | 1 << 30 | 1 << 34 | 1 << 38 | 1 << 40), 0, "{kind:?}");
        }
    }
}
