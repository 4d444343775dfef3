//! Up to the first request.

use super::{OPTION_BYTES, SPEC, TRANSFER_BYTES};
use crate::error::WireError;
use crate::limits::NAME_BYTES;
use crate::reader::{Reader, Stop, decode};

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const FIXED_NEWSTYLE: u32 = 1;
const NO_ZEROES: u32 = 2;

const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const LIST: u32 = 3;
const INFO: u32 = 6;
const GO: u32 = 7;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// There are flags; FLUSH, FUA, TRIM and WRITE_ZEROES are understood.
const TRANSMISSION_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6;

/// What the server says first: its two magic numbers, fixed newstyle, and that it can leave zeroes out.
pub const GREETING: [u8; 18] = *b"NBDMAGICIHAVEOPT\x00\x03";
/// Zeroes behind the answer to the oldest option, unless the client said that it wants none.
pub const ZEROES_BYTES: usize = 124;

/// What a connection for a disk begins with at a standby's address, before NBD's first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskHello;

impl DiskHello {
    /// Its first four bytes, "STND".
    pub const MAGIC: [u8; 4] = *b"STND";
    /// All of it: the magic, and version 1.
    pub const BYTES: [u8; 8] = *b"STND\x00\x00\x00\x01";

    /// Whether it is one that this version knows; `None` until all of it is there.
    ///
    /// # Errors
    /// [`WireError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<Option<usize>, WireError> {
        let done = decode(bytes, "disk hello", |r| {
            if r.array::<4>()? != Self::MAGIC {
                return Err(r.bad(SPEC, "the magic is not \"STND\""));
            }
            match r.u32()? {
                1 => Ok(()),
                version => Err(r.unfit(
                    SPEC,
                    format!("version {version}, only 1 is known: run the same Sterna on both sides"),
                )),
            }
        });
        Ok(done?.map(|((), length)| length))
    }
}

/// The client's flags: whether zeroes go behind the answer to EXPORT_NAME.
///
/// # Errors
/// [`WireError`] for a client that is older than the fixed newstyle, or has flags that nobody offered.
pub fn client_flags(bytes: &[u8]) -> Result<Option<(bool, usize)>, WireError> {
    decode(bytes, "NBD client flags", |r| match r.u32()? {
        FIXED_NEWSTYLE => Ok(true),
        flags if flags == FIXED_NEWSTYLE | NO_ZEROES => Ok(false),
        flags => Err(r.bad(SPEC, format!("flags {flags:#x}: fixed newstyle, and perhaps no zeroes"))),
    })
}

/// What the client wants to know or to begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientOption {
    /// Begin with the export of this name. There is no answer but the export, or the end.
    ExportName(String),
    /// Tell of the export of this name (`INFO`), or begin with it (`GO`).
    Export {
        /// Its name.
        name: String,
        /// Whether the transmission begins.
        is_go: bool,
    },
    /// Name all exports.
    List,
    /// End.
    Abort,
    /// One that this server does not know. Its data are passed over.
    Unknown(u32),
}

impl ClientOption {
    /// Reads an option; `None` until all of it is there.
    ///
    /// # Errors
    /// [`WireError`]: the option is longer than [`OPTION_BYTES`], or its parts do not fill it.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        decode(bytes, "NBD option", |r| {
            if r.u64()? != OPTION_MAGIC {
                return Err(r.bad(SPEC, "the magic is not \"IHAVEOPT\""));
            }
            let option = r.u32()?;
            let length = r.u32()?;
            if length > OPTION_BYTES {
                return Err(r.bad(SPEC, format!("{length} bytes of data, at most {OPTION_BYTES}")));
            }
            let data = r.take(length as usize)?;
            let name = |bytes: &[u8]| name(r, bytes);
            match option {
                EXPORT_NAME => Ok(Self::ExportName(name(data)?)),
                ABORT => Ok(Self::Abort),
                LIST if data.is_empty() => Ok(Self::List),
                LIST => Err(r.bad(SPEC, "LIST has data")),
                INFO | GO => {
                    let (head, rest) = data.split_at_checked(4).ok_or_else(|| r.bad(SPEC, "no name"))?;
                    let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
                    let (bytes, rest) = usize::try_from(length)
                        .ok()
                        .and_then(|length| rest.split_at_checked(length))
                        .ok_or_else(|| r.bad(SPEC, format!("a name of {length} bytes does not fit")))?;
                    let (count, requests) =
                        rest.split_at_checked(2).ok_or_else(|| r.bad(SPEC, "no information requests"))?;
                    // What is asked for is told unasked; only their number must be right.
                    if usize::from(u16::from_be_bytes([count[0], count[1]])) * 2 != requests.len() {
                        return Err(r.bad(SPEC, "the information requests do not fill the option"));
                    }
                    Ok(Self::Export { name: name(bytes)?, is_go: option == GO })
                }
                other => Ok(Self::Unknown(other)),
            }
        })
    }

    /// The option's number.
    pub fn number(&self) -> u32 {
        match self {
            Self::ExportName(_) => EXPORT_NAME,
            Self::Export { is_go: true, .. } => GO,
            Self::Export { is_go: false, .. } => INFO,
            Self::List => LIST,
            Self::Abort => ABORT,
            Self::Unknown(number) => *number,
        }
    }
}

fn name(r: &Reader<'_>, bytes: &[u8]) -> Result<String, Stop> {
    if bytes.len() > NAME_BYTES {
        return Err(r.bad(SPEC, format!("a name of {} bytes, at most {NAME_BYTES}", bytes.len())));
    }
    r.text(bytes).map(str::to_owned)
}

/// A disk as the server tells of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// Its length.
    pub len_bytes: u64,
}

/// An answer to an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OptionReply<'a> {
    /// Done: behind GO the transmission begins.
    Ack,
    /// A name, for LIST.
    Server(&'a str),
    /// Length and flags.
    Export(Export),
    /// How requests should lie: any byte, best 4096, at most [`TRANSFER_BYTES`].
    BlockSize,
    /// The server does not know the option.
    Unsupported,
    /// There is no export of that name; in words.
    UnknownExport(&'a str),
}

/// Appends the answer to the option of that number.
pub fn option_reply(option: u32, answer: &OptionReply<'_>, out: &mut Vec<u8>) {
    const ERROR: u32 = 1 << 31;
    let (kind, data) = match answer {
        OptionReply::Ack => (1, Vec::new()),
        OptionReply::Server(name) => (2, [&(name.len() as u32).to_be_bytes()[..], name.as_bytes()].concat()),
        OptionReply::Export(export) => (
            3,
            [
                &INFO_EXPORT.to_be_bytes()[..],
                &export.len_bytes.to_be_bytes(),
                &TRANSMISSION_FLAGS.to_be_bytes(),
            ]
            .concat(),
        ),
        OptionReply::BlockSize => {
            let sizes = [1, 4096, TRANSFER_BYTES].map(u32::to_be_bytes).concat();
            (3, [&INFO_BLOCK_SIZE.to_be_bytes()[..], &sizes].concat())
        }
        OptionReply::Unsupported => (ERROR | 1, Vec::new()),
        OptionReply::UnknownExport(why) => (ERROR | 6, why.as_bytes().to_vec()),
    };
    out.extend_from_slice(&REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&u32::to_be_bytes(kind));
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(&data);
}

/// Appends the answer to EXPORT_NAME, behind which the transmission begins.
pub fn export_name_reply(export: Export, has_zeroes: bool, out: &mut Vec<u8>) {
    out.extend_from_slice(&export.len_bytes.to_be_bytes());
    out.extend_from_slice(&TRANSMISSION_FLAGS.to_be_bytes());
    out.resize(out.len() + if has_zeroes { ZEROES_BYTES } else { 0 }, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(number: u32, data: &[u8]) -> Vec<u8> {
        let head = [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes()].concat();
        [&head[..], &(data.len() as u32).to_be_bytes(), data].concat()
    }

    #[test]
    fn options_are_read_and_answered_in_nbds_bytes() {
        let go = option(GO, b"\0\0\0\x02q0\0\x01\0\x03");
        let read = ClientOption::Export { name: "q0".into(), is_go: true };
        assert_eq!(ClientOption::decode(&go), Ok(Some((read, go.len()))));
        for length in 0..go.len() {
            assert_eq!(ClientOption::decode(&go[..length]), Ok(None));
        }
        assert_eq!(ClientOption::decode(&option(8, b"")), Ok(Some((ClientOption::Unknown(8), 16))));
        let mut said = Vec::new();
        option_reply(GO, &OptionReply::Export(Export { len_bytes: 0x1000 }), &mut said);
        let expected =
            b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x03\0\0\0\x0c\0\0\0\0\0\0\0\0\x10\0\0\x6d";
        assert_eq!(said, expected);
        said.clear();
        export_name_reply(Export { len_bytes: 512 }, true, &mut said);
        assert_eq!(said.len(), 10 + ZEROES_BYTES);
        assert_eq!(client_flags(&[0, 0, 0, 3]), Ok(Some((false, 4))));
    }

    #[test]
    fn what_breaks_a_rule_is_refused() {
        for (bytes, word) in [
            (b"NOTANOPT\0\0\0\x01\0\0\0\0".to_vec(), "IHAVEOPT"),
            ([&OPTION_MAGIC.to_be_bytes()[..], &[0, 0, 0, 1, 0x7f, 0, 0, 0]].concat(), "at most 4096"),
            (option(GO, b"\0\0\x01\0q0\0\0"), "does not fit"),
            (option(GO, b"\xff\xff\xff\xffq0\0\0"), "does not fit"),
            (option(GO, b"\0\0\0\x02q0"), "no information"),
            (option(GO, b"\0\0\0\x02q0\0\x02\0\x03"), "do not fill"),
            (option(EXPORT_NAME, b"q\0"), "NUL"),
            (option(EXPORT_NAME, &[b'q'; 300]), "at most 255"),
            (option(LIST, b"x"), "LIST"),
        ] {
            let refused = ClientOption::decode(&bytes).unwrap_err();
            assert!(refused.to_string().contains(word), "{refused}");
        }
        assert!(client_flags(&[0, 0, 0, 2]).is_err() && client_flags(&[0, 0, 1, 1]).is_err());
        assert!(DiskHello::decode(b"STND\0\0\0\x02").unwrap_err().to_string().contains("version 2"));
        assert_eq!(DiskHello::decode(&DiskHello::BYTES), Ok(Some(8)));
    }
}
