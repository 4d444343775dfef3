//! Packets of libvirt's RPC (specs/libvirt-rpc.md §1): head, errors, domains, events.

use crate::xdr::{Reader, Writer, XdrError};

/// Program number of libvirt's public functions.
pub const REMOTE: u32 = 0x2000_8086;
/// Program number of the functions for QEMU domains.
pub const QEMU: u32 = 0x2000_8087;
/// Program number of keep-alive messages.
pub const KEEP_ALIVE: u32 = 0x6b65_6570;
/// Procedure of a keep-alive question.
pub const PING: i32 = 1;
/// Procedure of a keep-alive answer.
pub const PONG: i32 = 2;
/// Largest packet, with its length field, in bytes. libvirt closes a connection that announces a larger one.
pub const PACKET_BYTES: usize = (32 << 20) + 4;

/// What a packet is, and to which call it belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Program number.
    pub program: u32,
    /// Version of the program. Every program has version 1.
    pub version: u32,
    /// Procedure of the program.
    pub procedure: i32,
    /// Kind of packet.
    pub kind: i32,
    /// Number of the call. 0 in messages without a call.
    pub serial: u32,
    /// 0: success, 1: error, 2: more of a stream follows.
    pub status: i32,
}

impl Head {
    /// Length of the length field and the head, in bytes.
    pub const BYTES: usize = 28;
    /// Kind: a call.
    pub const CALL: i32 = 0;
    /// Kind: the reply to a call.
    pub const REPLY: i32 = 1;
    /// Kind: a message without a call, such as an event.
    pub const MESSAGE: i32 = 2;
    /// Kind: a call with descriptors.
    pub const CALL_WITH_FILES: i32 = 4;

    /// The head of a message without a call.
    pub fn message(program: u32, procedure: i32) -> Self {
        Self { program, version: 1, procedure, kind: Self::MESSAGE, serial: 0, status: 0 }
    }

    /// Decodes the 24 bytes after the length field.
    ///
    /// # Errors
    /// The data is shorter.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            program: reader.u32("program")?,
            version: reader.u32("version")?,
            procedure: reader.i32("procedure")?,
            kind: reader.i32("kind")?,
            serial: reader.u32("serial")?,
            status: reader.i32("status")?,
        })
    }

    /// The complete packet with `payload`.
    pub fn packet(&self, payload: &[u8]) -> Vec<u8> {
        let length = (Self::BYTES + payload.len()) as u32;
        let head = Writer::default().u32(length).u32(self.program).u32(self.version).i32(self.procedure);
        head.i32(self.kind).u32(self.serial).i32(self.status).fixed(payload).into_bytes()
    }
}

/// Length of the packet with which `bytes` begin. None if more bytes are needed.
///
/// # Errors
/// No packet has this length: less than a head, or more than [`PACKET_BYTES`].
pub fn packet_length(bytes: &[u8]) -> Result<Option<usize>, u32> {
    let Some(length) = bytes.first_chunk() else { return Ok(None) };
    let stated = u32::from_be_bytes(*length);
    let length = stated as usize;
    if !(Head::BYTES..=PACKET_BYTES).contains(&length) { Err(stated) } else { Ok(Some(length)) }
}

/// libvirt's error, as it begins. The parts after the level are not needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorReply {
    /// libvirt's error number, such as 42: no such domain.
    pub code: i32,
    /// The part of libvirt that reports it.
    pub domain: i32,
    /// The text for people.
    pub message: String,
}

impl ErrorReply {
    /// Decodes the payload of a reply whose status is 1.
    ///
    /// # Errors
    /// The payload has another form.
    pub fn decode(payload: &[u8]) -> Result<Self, XdrError> {
        let mut reader = Reader::new(payload);
        let (code, domain) = (reader.i32("error code")?, reader.i32("error domain")?);
        let message = reader.optional_string("error message")?.unwrap_or_default().to_owned();
        reader.i32("error level")?;
        Ok(Self { code, domain, message })
    }
}

/// A domain, as procedures take and return it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// Name of the domain.
    pub name: String,
    /// UUID of the domain.
    pub uuid: [u8; 16],
    /// Number of the running domain. -1 if it does not run.
    pub id: i32,
}

impl Domain {
    /// Appends the domain to arguments.
    pub fn encode(&self, arguments: Writer) -> Writer {
        arguments.string(&self.name).fixed(&self.uuid).i32(self.id)
    }

    /// Decodes a domain.
    ///
    /// # Errors
    /// The data has another form.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let name = reader.string("domain name")?.to_owned();
        Ok(Self { name, uuid: reader.array("domain UUID")?, id: reader.i32("domain number")? })
    }
}

/// An event of the domain's QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorEvent {
    /// Number of the registration.
    pub callback: i32,
    /// The domain.
    pub domain: Domain,
    /// Name of the event, such as `STOP`.
    pub name: String,
    /// Time, whole seconds since the Unix epoch.
    pub seconds: i64,
    /// Time, microseconds of the second.
    pub microseconds: u32,
    /// JSON of the event's `data`, if it has any.
    pub details: Option<String>,
}

impl MonitorEvent {
    /// Procedure of the event in [`QEMU`].
    pub const PROCEDURE: i32 = 6;

    /// Decodes the payload of an event.
    ///
    /// # Errors
    /// The payload has another form.
    pub fn decode(payload: &[u8]) -> Result<Self, XdrError> {
        let mut reader = Reader::new(payload);
        Ok(Self {
            callback: reader.i32("callback")?,
            domain: Domain::decode(&mut reader)?,
            name: reader.string("event")?.to_owned(),
            seconds: reader.i64("seconds")?,
            microseconds: reader.u32("microseconds")?,
            details: reader.optional_string("details")?.map(str::to_owned),
        })
    }
}

/// Decodes the list of accepted authentications that AUTH_LIST returns.
///
/// # Errors
/// The payload has another form, or more than 20 elements.
pub fn authentications(payload: &[u8]) -> Result<Vec<u32>, XdrError> {
    let mut reader = Reader::new(payload);
    let count = reader.length("list of authentications", 20)?;
    (0..count).map(|_| reader.u32("authentication")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_begins_with_its_whole_length() {
        let packet = Head::message(KEEP_ALIVE, PONG).packet(&[]);

        assert_eq!(packet.len(), Head::BYTES);
        assert_eq!(packet_length(&packet), Ok(Some(28)));
        assert_eq!(Head::decode(&mut Reader::new(&packet[4..])), Ok(Head::message(KEEP_ALIVE, PONG)));
    }

    #[test]
    fn length_that_no_packet_has_is_refused_before_its_bytes_arrive() {
        for wrong in [0, 4, 27, PACKET_BYTES as u32 + 1, u32::MAX] {
            assert_eq!(packet_length(&wrong.to_be_bytes()), Err(wrong));
        }
        assert_eq!(packet_length(&[0, 0, 0]), Ok(None));
        assert_eq!(packet_length(&(PACKET_BYTES as u32).to_be_bytes()), Ok(Some(PACKET_BYTES)));
    }

    #[test]
    fn error_of_libvirt_12_8_is_read() {
        let payload = b"\x00\x00\x00*\x00\x00\x00\n\x00\x00\x00\x01\x00\x00\x005Domain not found: no domain with matching name 'nope'\
            \x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00";

        let error = ErrorReply::decode(payload).unwrap();

        assert_eq!((error.code, error.domain), (42, 10));
        assert_eq!(error.message, "Domain not found: no domain with matching name 'nope'");
    }
}
