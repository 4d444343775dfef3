//! The record of a device's rings. The destination starts the rings from it at the positions where the
//! source's back end stopped (specs/vhost-user.md §4).

use std::sync::Arc;

use super::error::VhostUserError;
use super::ring::Ring;

const VERSION: u32 = 1;
const HEAD_BYTES: usize = 14;
const RING_BYTES: usize = 28;
/// Highest number of rings in a record. It is more than any device has, and far below the 64 KiB limit of a
/// configuration.
pub(super) const RINGS_MAX: usize = 1024;

/// Negotiated features, and the addresses and positions of the rings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Configuration {
    pub(super) features: u64,
    pub(super) rings: Vec<Ring>,
}

impl Configuration {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + RING_BYTES * self.rings.len());
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.features.to_le_bytes());
        bytes.extend((self.rings.len() as u16).to_le_bytes());
        for ring in &self.rings {
            bytes.extend(ring.size.to_le_bytes());
            bytes.extend(ring.base.to_le_bytes());
            for address in [ring.descriptors, ring.available, ring.used] {
                bytes.extend(address.to_le_bytes());
            }
        }
        bytes
    }

    /// Decodes the peer's bytes. The rings' addresses are not checked here.
    pub(super) fn decode(device: &Arc<str>, bytes: &[u8]) -> Result<Self, VhostUserError> {
        let refuse = |rule: String| VhostUserError::Configuration { device: Arc::clone(device), rule };
        let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
            return Err(refuse(format!("{} bytes are too few", bytes.len())));
        };
        let version = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        if version != VERSION {
            return Err(refuse(format!("version {version} is unknown; update this side")));
        }
        let features = word(&head[4..12]);
        let count = usize::from(u16::from_le_bytes([head[12], head[13]]));
        if count > RINGS_MAX || rest.len() != count * RING_BYTES {
            return Err(refuse(format!("{count} rings in {} bytes", rest.len())));
        }
        let rings = rest.chunks_exact(RING_BYTES).map(|ring| Ring {
            size: u16::from_le_bytes([ring[0], ring[1]]),
            base: u16::from_le_bytes([ring[2], ring[3]]),
            descriptors: word(&ring[4..12]),
            available: word(&ring[12..20]),
            used: word(&ring[20..28]),
        });
        Ok(Self { features, rings: rings.collect() })
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_rings() -> Configuration {
        let ring = Ring { size: 64, descriptors: 0x1000, available: 0x2000, used: 0x3000, base: 65_535 };
        let other = Ring { used: u64::MAX, base: 7, ..ring };
        Configuration { features: 1 << 63 | 5, rings: vec![ring, other] }
    }

    #[test]
    fn decode_of_encoded_is_the_same() {
        let configuration = two_rings();

        let decoded = Configuration::decode(&"fs".into(), &configuration.encode()).expect("good bytes");

        assert_eq!(decoded, configuration);
    }

    #[test]
    fn decode_of_every_other_length_is_refused() {
        let bytes = two_rings().encode();
        let device = "fs".into();

        for len in 0..bytes.len() {
            let error = Configuration::decode(&device, &bytes[..len]).expect_err("cut short");
            assert!(error.to_string().contains("fs"), "{error}");
        }
        let longer = [bytes.as_slice(), &[0]].concat();
        assert!(Configuration::decode(&device, &longer).is_err());
    }

    #[test]
    fn decode_of_another_version_is_refused() {
        let mut bytes = two_rings().encode();
        bytes[0] = 2;

        let error = Configuration::decode(&"fs".into(), &bytes).expect_err("version 2");

        assert!(error.to_string().contains("version 2"), "{error}");
    }
}
