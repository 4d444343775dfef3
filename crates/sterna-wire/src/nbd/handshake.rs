//! The NBD handshake, up to the first request.
//!
//! The server part of the fixed newstyle negotiation, and the hello that precedes it at a standby's address.

use super::limits::SPEC;
use super::limits::{OPTION_BYTES, TRANSFER_BYTES};
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

/// The flags field is valid; FLUSH, FUA, TRIM and WRITE_ZEROES are supported.
const TRANSMISSION_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6;

/// The server's first message: two magic numbers, fixed newstyle, no zeroes on request.
pub const GREETING: [u8; 18] = *b"NBDMAGICIHAVEOPT\x00\x03";
/// Number of zeroes after the answer to EXPORT_NAME, unless the client declined them.
pub const ZEROES_BYTES: usize = 124;

/// The first bytes of a disk connection at a standby's address, before NBD's first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskHello;

impl DiskHello {
    /// The first four bytes, "STND", which distinguish the connection from others.
    pub const MAGIC: [u8; 4] = *b"STND";
    /// The whole hello: the magic, and version 1.
    pub const BYTES: [u8; 8] = *b"STND\x00\x00\x00\x01";

    /// Checks a hello. Returns its length; `None` while bytes are missing.
    ///
    /// # Errors
    /// [`WireError`] for a wrong magic or an unknown version.
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

/// Reads the client's flags. True: zeroes follow the answer to EXPORT_NAME.
///
/// # Errors
/// [`WireError`] for a client without fixed newstyle, or with flags that the server did not offer.
pub fn client_flags(bytes: &[u8]) -> Result<Option<(bool, usize)>, WireError> {
    decode(bytes, "NBD client flags", |r| match r.u32()? {
        FIXED_NEWSTYLE => Ok(true),
        flags if flags == FIXED_NEWSTYLE | NO_ZEROES => Ok(false),
        flags => {
            Err(r.bad(SPEC, format!("flags {flags:#x} instead of fixed newstyle, with or without no zeroes")))
        }
    })
}

/// A request of the client during the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientOption {
    /// Starts transmission with the export of this name.
    ///
    /// The only answer is the export. If it does not exist, the server closes the connection.
    ExportName(String),
    /// Asks for the properties of an export (`INFO`), or also starts transmission (`GO`).
    Export {
        /// Name of the export.
        name: String,
        /// Whether transmission starts (`GO`).
        is_go: bool,
    },
    /// Asks for the names of all exports.
    List,
    /// Ends the session during the handshake.
    Abort,
    /// An option that this server does not know. Its data are skipped.
    Unknown(u32),
}

impl ClientOption {
    /// Reads one option from the start of `bytes`; `None` while bytes are missing.
    ///
    /// # Errors
    /// [`WireError`] when the option is longer than [`OPTION_BYTES`], or its parts do not fill it.
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
                    let (head, rest) =
                        data.split_at_checked(4).ok_or_else(|| r.bad(SPEC, "the name is missing"))?;
                    let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
                    let (bytes, rest) = usize::try_from(length)
                        .ok()
                        .and_then(|length| rest.split_at_checked(length))
                        .ok_or_else(|| r.bad(SPEC, format!("a name of {length} bytes does not fit")))?;
                    let (count, requests) =
                        rest.split_at_checked(2).ok_or_else(|| r.bad(SPEC, "no information requests"))?;
                    // The server sends all information in any case, so only the number of requests must be right.
                    if usize::from(u16::from_be_bytes([count[0], count[1]])) * 2 != requests.len() {
                        return Err(r.bad(SPEC, "the information requests do not fill the option"));
                    }
                    Ok(Self::Export { name: name(bytes)?, is_go: option == GO })
                }
                other => Ok(Self::Unknown(other)),
            }
        })
    }

    /// The option's number on the wire.
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

/// The properties of a disk that the server states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// Length of the disk, in bytes.
    pub len_bytes: u64,
}

/// An answer of the server to an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OptionReply<'a> {
    /// Success. After GO, transmission starts.
    Ack,
    /// One export's name, in answer to LIST.
    Server(&'a str),
    /// Length and transmission flags of an export.
    Export(Export),
    /// Block sizes: minimum 1 byte, preferred 4096, maximum [`TRANSFER_BYTES`].
    BlockSize,
    /// The server does not know the option.
    Unsupported,
    /// No export has the requested name. The text explains it to the user.
    UnknownExport(&'a str),
}

/// Appends the answer to the option with this number.
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

/// Appends the answer to EXPORT_NAME. Transmission starts after it.
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
