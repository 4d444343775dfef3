//! A hand-made primary's side of the contact: it sends only the test's messages.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use sterna::Address;
use sterna_standby::{Protection, Secret};
use sterna_wire::extension::ChannelBinding;
use sterna_wire::replica::{ArbiterIdentity, Hello, Message, Role, Session, Terms, Welcome};

use crate::support;

pub const PROTECTION: Protection = Protection { id: [9; 16], generation: 3 };

pub fn secret() -> Secret {
    Secret::from_bytes([5; 32])
}

pub struct Heart {
    socket: TcpStream,
    sends: Session,
    reads: Session,
    beats: u64,
}

/// A lease that does not end on a busy host, or a short one.
fn terms(is_long: bool) -> Terms {
    Terms {
        heartbeat_us: 20_000,
        lease_us: if is_long { 600_000_000 } else { 100_000 },
        margin_us: 50_000,
        claim_interval_us: 20_000,
        drift_per_mille: 10,
    }
}

impl Heart {
    /// Sends a greeting. It announces that the primary cannot stop its guest, like a QEMU's.
    pub fn greet(to: &Address, secret: &Secret, is_long: bool) -> io::Result<Self> {
        Self::greet_with(to, secret, is_long, |hello, _| hello)
    }

    /// Greets like a Sterna that sends pages as differences over multifd channels.
    pub fn greet_announcing_differences(to: &Address, secret: &Secret) -> io::Result<Self> {
        Self::greet_with(to, secret, true, |hello, binding| hello.announcing_differences(secret, binding))
    }

    fn greet_with(
        to: &Address,
        secret: &Secret,
        is_long: bool,
        and: impl FnOnce(Hello, &ChannelBinding) -> Hello,
    ) -> io::Result<Self> {
        let mut socket = TcpStream::connect(("127.0.0.1", support::port(to)))?;
        socket.set_read_timeout(Some(Duration::from_secs(30)))?;
        let binding: ChannelBinding = None;
        let Protection { id, generation } = PROTECTION;
        let hello = Hello::new(id, generation, true, terms(is_long), [1; 16], secret, &binding);
        let hello = and(hello, &binding);
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        socket.write_all(&bytes)?;
        let mut answer = [0; Welcome::BYTES];
        socket.read_exact(&mut answer)?;
        let (welcome, _) = Welcome::decode(&answer).expect("a welcome").expect("whole");
        assert!(welcome.is_authentic(&hello, secret, &binding));
        let session = Session::new(Role::Primary, secret, &hello, &welcome, &binding);
        let mut heart = Self { socket, sends: session.clone(), reads: session, beats: 0 };
        heart.compare_arbiters(&ArbiterIdentity::default())?;
        Ok(heart)
    }

    fn compare_arbiters(&mut self, identity: &ArbiterIdentity) -> io::Result<()> {
        let mut bytes = Vec::new();
        self.sends.seal_arbiter(identity, &mut bytes).expect("short");
        self.socket.write_all(&bytes)?;
        let mut head = [0; ArbiterIdentity::HEAD_BYTES];
        self.socket.read_exact(&mut head)?;
        let mut bytes = head.to_vec();
        bytes.resize(head.len() + ArbiterIdentity::rest_bytes(head).expect("permitted"), 0);
        self.socket.read_exact(&mut bytes[head.len()..])?;
        let (theirs, _) = self.reads.open_arbiter(&bytes).expect("authentic").expect("whole");
        assert!(theirs.is_same(identity), "{theirs:?}");
        Ok(())
    }

    pub fn say(&mut self, message: Message) {
        let mut bytes = Vec::new();
        self.sends.seal(message, &mut bytes).expect("the primary's");
        let _ = self.socket.write_all(&bytes);
    }

    pub fn hear(&mut self) -> Option<Message> {
        let mut bytes = [0; Message::BYTES];
        self.socket.read_exact(&mut bytes).ok()?;
        Some(self.reads.open(&bytes).expect("authentic").expect("whole").0)
    }

    /// Sends a heartbeat. Returns the number of held checkpoints.
    pub fn beat(&mut self) -> u64 {
        self.beats += 1;
        self.say(Message::Heartbeat(self.beats));
        loop {
            match self.hear().expect("an answer") {
                Message::Answer { held, heartbeat } if heartbeat == self.beats => return held,
                Message::Answer { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// The next message that is not an answer; `None` if the peer closes.
    pub fn hear_word(&mut self) -> Option<Message> {
        loop {
            match self.hear()? {
                Message::Answer { .. } => {}
                other => return Some(other),
            }
        }
    }

    pub fn close(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}
