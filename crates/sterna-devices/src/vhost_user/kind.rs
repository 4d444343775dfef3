//! The guest's view of a device: its kind, its features, and its configuration space. The features are those
//! of the back end that a driver may choose.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_FS, VIRTIO_ID_NET};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// Length of a file system's tag in its configuration space, in bytes.
const TAG_BYTES: usize = 36;
/// Lengths of VIRTIO 1.2's configuration spaces, without fields of features that are not offered.
const FILE_SYSTEM_BYTES: usize = TAG_BYTES + 4;
const BLOCK_BYTES: usize = 60;
const NETWORK_BYTES: usize = 12;
/// Offsets in a disk's configuration space: block size (u32) and number of queues (u16).
const BLOCK_SIZE_AT: usize = 20;
const BLOCK_QUEUES_AT: usize = 34;

/// Features of every kind. They are offered if the back end has them. Features of the transport (notification
/// data, reset of one queue) and of rings other than split ones are not offered.
const COMMON: u64 = bits(&[VIRTIO_RING_F_INDIRECT_DESC, VIRTIO_RING_F_EVENT_IDX, VIRTIO_F_VERSION_1]);
const VERSION_1: u64 = bits(&[VIRTIO_F_VERSION_1]);
/// Features of a disk. A write cache that the driver can switch is not offered, because the configuration space
/// is read-only.
const BLOCK: u64 = bits(&[
    VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_GEOMETRY,
    VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_BLK_SIZE,
    VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_DISCARD,
    VIRTIO_BLK_F_WRITE_ZEROES,
]);
const BLOCK_SIZE: u64 = bits(&[VIRTIO_BLK_F_BLK_SIZE]);
const BLOCK_QUEUES: u64 = bits(&[VIRTIO_BLK_F_MQ]);
/// Features of a network card. Features with a control queue are not offered, because its commands would have to
/// reach the VMM.
const NETWORK: u64 = bits(&[
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_GUEST_UFO,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_ECN,
    VIRTIO_NET_F_HOST_UFO,
    VIRTIO_NET_F_MRG_RXBUF,
]);
const NETWORK_MAC: u64 = bits(&[VIRTIO_NET_F_MAC]);

/// Kind of a vhost-user device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceKind {
    /// virtio-fs. Its first queue is for urgent requests, and the others are for normal ones.
    FileSystem {
        /// Tag by which the guest mounts the file system, 1 to 36 bytes. If `None`, the back end must report
        /// it.
        tag: Option<String>,
    },
    /// virtio-blk: a disk.
    Block,
    /// virtio-net with one pair of queues.
    Network {
        /// The card's address. If `None`, the back end must report it.
        mac: Option<[u8; 6]>,
    },
}

impl DeviceKind {
    /// Name of the kind on the command line.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::FileSystem { .. } => "fs",
            Self::Block => "blk",
            Self::Network { .. } => "net",
        }
    }

    /// Virtio's device type number.
    pub fn virtio_id(&self) -> u32 {
        match self {
            Self::Network { .. } => VIRTIO_ID_NET,
            Self::Block => VIRTIO_ID_BLOCK,
            Self::FileSystem { .. } => VIRTIO_ID_FS,
        }
    }

    /// Total number of queues of a device with `of_requests` queues for requests, or queue pairs.
    pub fn queues(&self, of_requests: usize) -> usize {
        match self {
            Self::Block => of_requests,
            Self::FileSystem { .. } => of_requests + 1,
            Self::Network { .. } => 2 * of_requests,
        }
    }

    /// Whether a back end of this kind must be able to transfer its state. A disk's back end has no state
    /// except its rings. A network's back end transfers its state if it can.
    pub(super) fn needs_state(&self) -> bool {
        matches!(self, Self::FileSystem { .. })
    }

    /// Whether every entry that a driver makes available is answered. A network card keeps buffers for
    /// packets that may never arrive.
    pub(super) fn answers_all(&self) -> bool {
        !matches!(self, Self::Network { .. })
    }

    /// Features of the back end that a driver may choose.
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

    /// Features that affect only the configuration space. The back end need neither offer nor get them, so
    /// that both sides of a migration may have back ends that differ in them.
    pub(super) fn features_of_front_end(&self) -> u64 {
        if matches!(self, Self::Network { .. }) { NETWORK_MAC } else { 0 }
    }

    /// Length of the configuration space in bytes.
    pub(super) fn space_bytes(&self) -> usize {
        match self {
            Self::FileSystem { .. } => FILE_SYSTEM_BYTES,
            Self::Block => BLOCK_BYTES,
            Self::Network { .. } => NETWORK_BYTES,
        }
    }

    /// The configuration space of a device with `queues` queues. It combines the back end's values, which are
    /// checked, with the operator's.
    ///
    /// # Errors
    /// The rule that a value breaks.
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
                "{} bytes of configuration, but {} were requested",
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
                            "`{tag}` is not a tag: use 1 to {TAG_BYTES} bytes without zero bytes"
                        ));
                    }
                    space[..TAG_BYTES].fill(0);
                    space[..bytes.len()].copy_from_slice(bytes);
                }
                let length = space[..TAG_BYTES].iter().position(|byte| *byte == 0).unwrap_or(TAG_BYTES);
                if length == 0 {
                    return Err(
                        "the back end does not report the file system's tag; give it (`tag=NAME`)".to_owned()
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
                        "the configuration has {theirs} request queues, but {request_queues} are required"
                    ));
                }
                space[TAG_BYTES..].copy_from_slice(&request_queues.to_le_bytes());
            }
            Self::Block => {
                if !is_said {
                    return Err(
                        "the back end does not report the disk's size; use a back end with CONFIG".to_owned()
                    );
                }
                let size = word(&space, BLOCK_SIZE_AT);
                if features & BLOCK_SIZE != 0 && !(size.is_power_of_two() && (512..=1 << 20).contains(&size))
                {
                    return Err(format!("{size} bytes are not a valid block size of a disk"));
                }
                let theirs =
                    usize::from(u16::from_le_bytes([space[BLOCK_QUEUES_AT], space[BLOCK_QUEUES_AT + 1]]));
                let theirs = if features & BLOCK_QUEUES == 0 { 1 } else { theirs };
                if theirs < queues {
                    return Err(format!("the configuration has {theirs} queues, but {queues} are required"));
                }
                space[BLOCK_QUEUES_AT..BLOCK_QUEUES_AT + 2].copy_from_slice(&(queues as u16).to_le_bytes());
            }
            Self::Network { mac } => {
                if let Some(mac) = mac {
                    space[..6].copy_from_slice(mac);
                }
                if space[..6] == [0; 6] || space[0] & 1 == 1 {
                    return Err(
                        "the back end does not report the network card's address; give it (`mac=ADDRESS`)"
                            .to_owned(),
                    );
                }
                // Fields of features that are not offered.
                space[6..].fill(0);
            }
        }
        Ok(space)
    }
}

/// The set of the features with these numbers.
const fn bits(numbers: &[u32]) -> u64 {
    let (mut set, mut index) = (0, 0);
    while index < numbers.len() {
        set |= 1 << numbers[index];
        index += 1;
    }
    set
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
            (refusal(&fs(None), 2, None), "give it (`tag=NAME`)"),
            (refusal(&fs(Some("")), 2, None), "1 to 36 bytes"),
            (refusal(&fs(Some(&"x".repeat(37))), 2, None), "1 to 36 bytes"),
            (refusal(&fs(None), 2, tag(b"", 1)), "tag=NAME"),
            (refusal(&fs(None), 2, tag(b"a\0b", 1)), "ends in zeros"),
            (refusal(&fs(None), 2, tag(b"\xff", 1)), "is not text"),
            (refusal(&fs(None), 3, tag(b"a", 1)), "1 request queues, but 2 are required"),
            (refusal(&DeviceKind::Block, 1, None), "does not report the disk's size"),
            (refusal(&DeviceKind::Block, 1, block(0, 1)), "0 bytes"),
            (refusal(&DeviceKind::Block, 1, block(513, 1)), "513 bytes"),
            (refusal(&DeviceKind::Block, 1, block(512, 0)), "0 queues, but 1 are required"),
            (refusal(&DeviceKind::Block, 1, Some(vec![0; 59])), "59 bytes"),
            (refusal(&card, 2, Some(vec![0; 12])), "mac=ADDRESS"),
            (refusal(&card, 2, Some(vec![1; 12])), "mac=ADDRESS"),
        ] {
            assert!(why.contains(says), "{why}");
        }
        assert!(fs(None).features(1 << 30).is_err());
    }

    #[test]
    fn features_and_ids_of_each_kind_are_those_of_virtio() {
        // Migrations compare these numbers, so they must not change with a release of the bindings.
        let offered = |kind: &DeviceKind| kind.features(u64::MAX).expect("features");

        assert_eq!((fs(None).virtio_id(), offered(&fs(None))), (26, 0x1_3000_0000));
        assert_eq!((DeviceKind::Block.virtio_id(), offered(&DeviceKind::Block)), (2, 0x1_3000_7676));
        let card = DeviceKind::Network { mac: None };
        assert_eq!((card.virtio_id(), offered(&card)), (1, 0x1_3000_ffa3));
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
