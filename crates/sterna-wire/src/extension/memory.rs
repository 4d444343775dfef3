//! Guest RAM as file descriptors, between two processes of one host (`specs/extension.md §11`).
//!
//! The destination maps the source's memory, so that no page is copied.

use super::secret::MacBytes;
use super::secret::MigrationSecret;
use crate::error::WireError;
use crate::reader;

const SPEC: &str = "specs/extension.md §11";
const MAGIC: u32 = 0x5354_4e4d;
const VERSION: u32 = 1;
const VERSION_BYTES: [u8; 4] = VERSION.to_be_bytes();
const LABEL: &str = "sterna memory";

/// The start of a connection that transfers file descriptors.
///
/// One byte follows with the descriptors attached, then the table that describes each descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryOffer {
    /// The id from the handover section.
    pub migration_id: [u8; 16],
    /// Length of the table, in bytes.
    pub table_bytes: u32,
    mac: MacBytes,
}

impl MemoryOffer {
    /// The first four bytes of the connection, "STNM". No other kind of connection starts with them.
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 60;
    /// Longest table, in bytes. A longer one is refused before it is read.
    pub const TABLE_BYTES_MAX: u32 = 1 << 20;

    /// An offer of the descriptors in `table`, for the migration with this id and secret.
    pub fn new(migration_id: [u8; 16], secret: &MigrationSecret, table: &[u8]) -> Self {
        let mac = secret.mac(LABEL, &[&VERSION_BYTES, &migration_id, table]);
        Self { migration_id, table_bytes: table.len() as u32, mac }
    }

    /// Whether a peer that knows the secret made this offer, with this table.
    #[must_use]
    pub fn is_authentic(&self, secret: &MigrationSecret, table: &[u8]) -> bool {
        secret.verify(LABEL, &[&VERSION_BYTES, &self.migration_id, table], &self.mac)
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION_BYTES);
        out.extend_from_slice(&self.migration_id);
        out.extend_from_slice(&self.table_bytes.to_be_bytes());
        out.extend_from_slice(&self.mac);
    }

    /// Reads one offer from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A wrong magic or version; a table above [`TABLE_BYTES_MAX`](Self::TABLE_BYTES_MAX).
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "offer of memory", |r| {
            if r.u32()? != MAGIC {
                return Err(r.bad(SPEC, "the magic is not \"STNM\""));
            }
            let version = r.u32()?;
            if version != VERSION {
                let rule =
                    format!("version {version}, only {VERSION} is known: run the same Sterna on both sides");
                return Err(r.unfit(SPEC, rule));
            }
            let migration_id = r.array()?;
            let table_bytes = r.u32()?;
            if table_bytes > Self::TABLE_BYTES_MAX {
                let most = Self::TABLE_BYTES_MAX;
                return Err(
                    r.bad(SPEC, format!("a table of {table_bytes} bytes; at most {most} are accepted"))
                );
            }
            Ok(Self { migration_id, table_bytes, mac: r.array()? })
        })
    }
}

/// One entry of the table: the meaning of the next descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandedOver {
    /// One descriptor: the memory of a RAM block.
    Block {
        /// Name of the RAM block.
        name: String,
        /// Length of the block, in bytes.
        len_bytes: u64,
        /// Size of the block's host pages, in bytes.
        page_bytes: u64,
        /// Offset of the block in the file, in bytes.
        offset: u64,
    },
    /// Descriptors that belong to a device.
    Device {
        /// Name of the device.
        name: String,
        /// Number that distinguishes devices with the same name.
        instance: u32,
        /// Number of descriptors of this device.
        count: u32,
    },
}

impl HandedOver {
    /// Number of descriptors that the entry describes.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Block { .. } => 1,
            Self::Device { count, .. } => *count as usize,
        }
    }

    /// Appends the entry. The caller ensures that the name has 1 to 255 bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut head = |kind: u8, name: &str| {
            out.push(kind);
            out.push(name.len() as u8);
            out.extend_from_slice(name.as_bytes());
        };
        match self {
            Self::Block { name, len_bytes, page_bytes, offset } => {
                head(1, name);
                for number in [len_bytes, page_bytes, offset] {
                    out.extend_from_slice(&number.to_be_bytes());
                }
            }
            Self::Device { name, instance, count } => {
                head(2, name);
                out.extend_from_slice(&instance.to_be_bytes());
                out.extend_from_slice(&count.to_be_bytes());
            }
        }
    }

    /// Reads a whole table.
    ///
    /// # Errors
    /// An entry of unknown kind, without a name, or cut short.
    pub fn decode_table(mut table: &[u8]) -> Result<Vec<Self>, WireError> {
        let (mut entries, whole) = (Vec::new(), table.len());
        while !table.is_empty() {
            let at = (whole - table.len()) as u64;
            match Self::decode(table).map_err(|error| error.at(at))? {
                Some((entry, used)) => {
                    entries.push(entry);
                    table = &table[used..];
                }
                None => {
                    let rule = "the table ends inside an entry";
                    return Err(WireError::misbehaved("table of descriptors", at, SPEC, rule));
                }
            }
        }
        Ok(entries)
    }

    fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "table of descriptors", |r| {
            let kind = r.u8()?;
            let name = r.name()?.to_owned();
            match kind {
                1 => Ok(Self::Block { name, len_bytes: r.u64()?, page_bytes: r.u64()?, offset: r.u64()? }),
                2 => Ok(Self::Device { name, instance: r.u32()?, count: r.u32()? }),
                other => Err(r.bad(SPEC, format!("an entry of kind {other}; only 1 and 2 are known"))),
            }
        })
    }
}

/// The destination's answer to an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryAnswer {
    /// The memory is mapped, read-only.
    Taken,
    /// The destination refused the offer and mapped nothing. The text is its reason.
    Refused(String),
}

impl MemoryAnswer {
    /// Longest reason, in bytes. A longer one is cut.
    const REASON_BYTES_MAX: usize = 4096;

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC.to_be_bytes());
        let (status, reason): (u32, &str) = match self {
            Self::Taken => (0, ""),
            Self::Refused(reason) => (1, reason),
        };
        let mut length = reason.len().min(Self::REASON_BYTES_MAX);
        while !reason.is_char_boundary(length) {
            length -= 1;
        }
        out.extend_from_slice(&status.to_be_bytes());
        out.extend_from_slice(&(length as u32).to_be_bytes());
        out.extend_from_slice(&reason.as_bytes()[..length]);
    }

    /// Reads one answer from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A wrong magic or status; a reason that is too long.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "answer to an offer of memory", |r| {
            if r.u32()? != MAGIC {
                return Err(r.bad(SPEC, "the magic is not \"STNM\""));
            }
            let status = r.u32()?;
            let length = r.u32()? as usize;
            if length > Self::REASON_BYTES_MAX {
                return Err(r.bad(SPEC, format!("a reason of {length} bytes")));
            }
            let bytes = r.take(length)?;
            let reason = r.text(bytes)?.to_owned();
            match status {
                0 if reason.is_empty() => Ok(Self::Taken),
                1 => Ok(Self::Refused(reason)),
                other => Err(r.bad(SPEC, format!("status {other} with a reason of {length} bytes"))),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(byte: u8) -> MigrationSecret {
        MigrationSecret::from_bytes([byte; MigrationSecret::BYTES])
    }

    fn entries() -> Vec<HandedOver> {
        vec![
            HandedOver::Block { name: "ram.low".into(), len_bytes: 1 << 30, page_bytes: 4096, offset: 8192 },
            HandedOver::Device { name: "network card".into(), instance: 3, count: 2 },
        ]
    }

    fn table() -> Vec<u8> {
        let mut table = Vec::new();
        entries().iter().for_each(|entry| entry.encode(&mut table));
        table
    }

    #[test]
    fn offer_proves_its_table_and_nothing_else() {
        let (table, mut bytes) = (table(), Vec::new());
        MemoryOffer::new([1; 16], &secret(7), &table).encode(&mut bytes);
        let (offer, used) = MemoryOffer::decode(&bytes).unwrap().unwrap();

        assert_eq!((used, bytes.len()), (MemoryOffer::BYTES, MemoryOffer::BYTES));
        assert_eq!((offer.migration_id, offer.table_bytes as usize), ([1; 16], table.len()));
        assert!(offer.is_authentic(&secret(7), &table));
        assert!(!offer.is_authentic(&secret(8), &table));
        let mut other = table;
        other[3] ^= 1;
        assert!(!offer.is_authentic(&secret(7), &other));
        for cut in 0..bytes.len() {
            assert_eq!(MemoryOffer::decode(&bytes[..cut]), Ok(None));
        }
        for (at, word) in [(0, "magic"), (7, "version"), (24, "table")] {
            let mut broken = bytes.clone();
            broken[at] ^= 0xff;
            assert!(MemoryOffer::decode(&broken).unwrap_err().to_string().contains(word));
        }
    }

    #[test]
    fn table_that_breaks_off_or_has_unknown_entries_is_refused() {
        let table = table();
        assert_eq!(HandedOver::decode_table(&table), Ok(entries()));
        assert_eq!(HandedOver::decode_table(&[]), Ok(Vec::new()));
        let first = table.len() - 8 - "network card".len() - 2;
        for cut in (1..table.len()).filter(|cut| *cut != first) {
            let refused = HandedOver::decode_table(&table[..cut]).unwrap_err();
            assert!(refused.to_string().contains("inside an entry"), "{cut}: {refused}");
        }
        let mut unknown = table;
        unknown[0] = 9;
        assert!(HandedOver::decode_table(&unknown).unwrap_err().to_string().contains("kind 9"));
    }

    #[test]
    fn answer_keeps_a_reason_that_is_not_too_long() {
        for answer in [MemoryAnswer::Taken, MemoryAnswer::Refused("ä".repeat(100))] {
            let mut bytes = Vec::new();
            answer.encode(&mut bytes);
            assert_eq!(MemoryAnswer::decode(&bytes[..bytes.len() - 1]), Ok(None));
            let length = bytes.len();
            assert_eq!(MemoryAnswer::decode(&bytes), Ok(Some((answer, length))));
        }
        let mut bytes = Vec::new();
        MemoryAnswer::Refused("ä".repeat(5000)).encode(&mut bytes);
        let Ok(Some((MemoryAnswer::Refused(reason), _))) = MemoryAnswer::decode(&bytes) else { panic!() };
        assert_eq!(reason, "ä".repeat(2048));
        bytes[8..12].copy_from_slice(&5000_u32.to_be_bytes());
        assert!(MemoryAnswer::decode(&bytes).is_err());
    }
}
