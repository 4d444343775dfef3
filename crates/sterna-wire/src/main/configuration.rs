//! Header and configuration, the first elements of the main channel (`specs/stream.md §1.1`, `§1.2`).

use super::expect::Expectations;
use crate::error::WireError;
use crate::limits::{CAPABILITIES, MACHINE_TYPE_BYTES, NAME_BYTES};
use crate::reader::{self, Reader, Stop};

const MAGIC: u32 = 0x5145_564d;
const VERSION: u32 = 3;
const CONFIGURATION: u8 = 0x07;
const SUBSECTION: u8 = 0x05;
const PREFIX: &[u8] = b"configuration/";
const HEADER: &str = "file header";
const MESSAGE: &str = "configuration";
const SPEC: &str = "specs/stream.md §1.2";
/// Capabilities that both sides must agree on, in the order on the wire.
const VALIDATED: [&str; 2] = ["x-ignore-shared", "mapped-ram"];
/// Names of the capabilities in QEMU 11.1. Other names are refused.
const KNOWN: [&str; 21] = [
    "xbzrle",
    "rdma-pin-all",
    "auto-converge",
    "events",
    "postcopy-ram",
    "x-colo",
    "release-ram",
    "return-path",
    "pause-before-switchover",
    "multifd",
    "dirty-bitmaps",
    "postcopy-blocktime",
    "late-block-activate",
    "x-ignore-shared",
    "validate-uuid",
    "background-snapshot",
    "zero-copy-send",
    "postcopy-preempt",
    "switchover-ack",
    "dirty-limit",
    "mapped-ram",
];

/// The first eight bytes of the main channel: magic and version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileHeader;

impl FileHeader {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 8;
    /// The first four bytes, which distinguish the main channel from other channels.
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// The magic while `sterna repair` writes into an image in place (`specs/mapped-ram.md §7.5`).
    ///
    /// It makes readers refuse an image whose repair was interrupted.
    pub const REPAIR_MAGIC: [u8; 4] = *b"QEVR";

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION.to_be_bytes());
    }

    /// Reads one header from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A wrong magic or version.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, HEADER, Self::read)
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Stop> {
        let spec = "specs/stream.md §1.1";
        let magic = r.u32()?;
        if magic.to_be_bytes() == Self::REPAIR_MAGIC {
            let rule = "an in-place repair of this image was interrupted: repeat `sterna repair --in-place`";
            return Err(r.bad("specs/mapped-ram.md §7.5", rule));
        }
        if magic != MAGIC {
            return Err(r.bad(spec, "the magic is not 51 45 56 4d (\"QEVM\")"));
        }
        match r.u32()? {
            VERSION => Ok(Self),
            2 => Err(r.unfit(spec, "version 2 is obsolete, only 3 is known")),
            other => Err(r.unfit(spec, format!("version {other}, only {VERSION} is known"))),
        }
    }
}

/// The source's machine type, capabilities and UUID.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Configuration {
    /// Resolved machine type, such as `pc-i440fx-11.1`. At most 255 bytes.
    pub machine_type: String,
    /// log2 of the target page size. Absent on x86.
    pub target_page_bits: Option<u32>,
    /// Capabilities that both sides must agree on. Absent from the wire if empty.
    pub capabilities: Vec<String>,
    /// UUID of the VM in RFC 4122 byte order.
    pub uuid: Option<[u8; 16]>,
}

impl Configuration {
    /// Appends the configuration element.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when a name is too long or there are too many capabilities.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let local = |rule| Err(WireError::local(MESSAGE, 0, SPEC, rule));
        if self.machine_type.len() > MACHINE_TYPE_BYTES || self.machine_type.contains('\0') {
            return local(format!(
                "machine type {:?} is not at most 255 bytes without NUL",
                self.machine_type
            ));
        }
        if self.capabilities.len() > CAPABILITIES {
            return local(format!("{} capabilities, at most {CAPABILITIES}", self.capabilities.len()));
        }
        if let Some(name) = self.capabilities.iter().find(|name| name.is_empty() || name.len() > NAME_BYTES) {
            return local(format!("capability {name:?} is not 1 to 255 bytes"));
        }
        out.push(CONFIGURATION);
        out.extend_from_slice(&(self.machine_type.len() as u32).to_be_bytes());
        out.extend_from_slice(self.machine_type.as_bytes());
        if let Some(bits) = self.target_page_bits {
            put_subsection("configuration/target-page-bits", out);
            out.extend_from_slice(&bits.to_be_bytes());
        }
        if !self.capabilities.is_empty() {
            put_subsection("configuration/capabilities", out);
            out.extend_from_slice(&(self.capabilities.len() as u32).to_be_bytes());
            for name in &self.capabilities {
                out.push(name.len() as u8);
                out.extend_from_slice(name.as_bytes());
            }
        }
        if let Some(uuid) = &self.uuid {
            put_subsection("configuration/uuid", out);
            out.extend_from_slice(uuid);
        }
        Ok(())
    }

    /// Reads one configuration from the start of `buf`.
    ///
    /// The element has no end mark. The byte after it must therefore have arrived too.
    ///
    /// # Errors
    /// - another element, or another page size
    /// - a name that is too long, or too many capabilities
    /// - an unknown capability or subsection, or a repeated one
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, MESSAGE, Self::read)
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Stop> {
        if r.u8()? != CONFIGURATION {
            return Err(r.bad("specs/stream.md §1.1", "no configuration (07) follows the header"));
        }
        let length = r.u32()? as usize;
        if length > MACHINE_TYPE_BYTES {
            return Err(
                r.bad(SPEC, format!("a machine type of {length} bytes, more than {MACHINE_TYPE_BYTES}"))
            );
        }
        let name = r.take(length)?;
        let mut configuration = Self { machine_type: r.text(name)?.to_owned(), ..Self::default() };
        while configuration.read_subsection(r)? {}
        Ok(configuration)
    }

    /// Reads a subsection, if one follows. Returns whether it did.
    fn read_subsection(&mut self, r: &mut Reader<'_>) -> Result<bool, Stop> {
        let mut ahead = r.clone();
        if ahead.u8()? != SUBSECTION {
            return Ok(false);
        }
        let length = usize::from(ahead.u8()?);
        let name = ahead.take(length)?;
        if !name.starts_with(PREFIX) {
            return Ok(false);
        }
        let name = ahead.text(name)?;
        let field = ahead.clone();
        let version = ahead.u32()?;
        if version != 1 {
            return Err(ahead.unfit(SPEC, format!("version {version} of {name}; only 1 is known")));
        }
        let fresh = match name {
            "configuration/target-page-bits" => {
                let bits = ahead.u32()?;
                if bits != crate::PAGE_SHIFT {
                    return Err(
                        ahead.unfit(SPEC, format!("pages of 2^{bits} bytes, not 2^{}", crate::PAGE_SHIFT))
                    );
                }
                self.target_page_bits.replace(bits).is_none()
            }
            "configuration/capabilities" => {
                let fresh = self.capabilities.is_empty();
                self.capabilities = read_capabilities(&mut ahead)?;
                fresh
            }
            "configuration/uuid" => self.uuid.replace(ahead.array()?).is_none(),
            _ => return Err(field.unfit(SPEC, format!("subsection {name:?} is unknown"))),
        };
        if !fresh {
            return Err(field.bad(SPEC, format!("subsection {name} occurs twice")));
        }
        *r = ahead;
        Ok(true)
    }

    /// Compares the configuration with this side's expectations.
    ///
    /// # Errors
    /// [`Fault::PeerIncompatible`](crate::Fault::PeerIncompatible): another machine type, UUID or capability.
    pub fn check(&self, expect: &Expectations) -> Result<(), WireError> {
        let unfit = |rule| Err(WireError::incompatible(MESSAGE, 0, SPEC, rule));
        if let Some(machine) = &expect.machine_type
            && *machine != self.machine_type
        {
            let theirs = &self.machine_type;
            return unfit(format!(
                "machine type {theirs:?}, but this side has {machine:?}: start both sides with the \
                                  same machine type"
            ));
        }
        if let (Some(ours), Some(theirs)) = (&expect.uuid, &self.uuid)
            && ours != theirs
        {
            return unfit(
                "the VM's UUID differs from this side's: start both sides with the same UUID".to_owned(),
            );
        }
        for (name, ours) in VALIDATED.into_iter().zip([expect.ignore_shared, expect.mapped_ram]) {
            let theirs = self.capabilities.iter().any(|capability| capability == name);
            if ours != theirs {
                let word = |on| if on { "on" } else { "off" };
                let (here, there) = (word(ours), word(theirs));
                return unfit(format!("capability {name} is {here} here, but {there} at the peer"));
            }
        }
        Ok(())
    }
}

fn read_capabilities(r: &mut Reader<'_>) -> Result<Vec<String>, Stop> {
    let count = r.u32()? as usize;
    if count == 0 || count > CAPABILITIES {
        return Err(r.bad(SPEC, format!("{count} capabilities, not 1 to {CAPABILITIES}")));
    }
    let mut names = Vec::new();
    for _ in 0..count {
        let name = r.name()?;
        if !KNOWN.contains(&name) {
            return Err(r.unfit(SPEC, format!("capability {name:?} is unknown")));
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

fn put_subsection(name: &str, out: &mut Vec<u8>) {
    out.push(SUBSECTION);
    out.push(name.len() as u8);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&1u32.to_be_bytes());
}
