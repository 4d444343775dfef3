//! A session that gets any frames: it refuses what breaks the protocol, and its memory stays limited.

use std::time::Duration;

use sterna_relay::frame::{Frame, Head, SessionId};
use sterna_relay::session::{Event, Piece, Role, Session, Settings};

/// Longest payload; the session does not look into it.
const PAYLOAD: usize = 512;

/// Reads the input as instructions: frames of the peer on one of two carriers, and actions of this side's VMMs.
pub fn target(data: &[u8]) {
    let [role, rest @ ..] = data else { return };
    let mut rest = rest;
    let packs = role & 2 != 0;
    let role = if role % 2 == 0 { Role::Dialer } else { Role::Acceptor };
    let settings = Settings::new(0);
    let most = settings.buffer_bytes;
    let mut session = Session::new(SessionId([1; 16]), role, settings);
    if packs {
        session.agree();
    }
    let mut now = Duration::ZERO;
    let mut carriers = [0, 1].map(|lane| session.carrier_up(lane, now));
    while let Some((action, more)) = rest.split_first() {
        rest = more;
        now += Duration::from_millis(u64::from(*action));
        let at = usize::from(action >> 7);
        match action % 8 {
            0..4 => {
                let Some((head, body)) = rest.split_first_chunk() else { return };
                let Ok(head) = Head::decode(head) else { return };
                let Some((fixed, behind)) = body.split_at_checked(head.fixed_bytes()) else { return };
                let Ok(frame) = head.body(fixed) else { return };
                rest = behind;
                let payload = match frame {
                    Frame::Data { length, .. } if length <= PAYLOAD => Some(Piece::from(vec![0; length])),
                    Frame::Data { .. } => return,
                    _ => None,
                };
                // Bytes with a reference to a page that this side lacks.
                let result = match frame {
                    Frame::Packed { flow, head, .. } if packs && role == Role::Acceptor => {
                        session.missing(carriers[at], flow, head.offset, head.length, now)
                    }
                    frame => session.receive(carriers[at], frame, payload, now),
                };
                if result.is_err() {
                    return;
                }
            }
            4 => {
                session.open(now);
                for flow in 1..4 {
                    let room = session.room(flow, now).min(100);
                    session.note_pages(flow, &[u64::from(*action) * 8]);
                    session.take(flow, vec![0; room as usize].into(), now);
                }
            }
            5 => drop(session.next_frame(carriers[at], now)),
            6 => {
                for flow in 1..4 {
                    session.delivered(flow, 50);
                }
                session.tick(now);
            }
            _ => {
                session.carrier_down(carriers[at], now);
                carriers[at] = session.carrier_up(at as u8, now);
            }
        }
        for event in session.take_events() {
            if let Event::Close(id) = event {
                session.carrier_down(id, now);
            }
        }
        let (stored, waiting) = session.held_bytes();
        assert!(stored <= most && waiting <= most, "{stored} and {waiting} bytes are held");
    }
}

/// First inputs, with their names: the same conversation for each role, with and without compression.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    use sterna_relay::frame::{Method, PackedHead};
    let head = PackedHead { offset: 3, check: 0, length: 9, pages: 1, method: Method::Plain };
    let ack = |received| Frame::Ack {
        flow: 1,
        received,
        delivered: received,
        credit: 16_384 + received,
        has_end: false,
        has_stop: false,
    };
    let frames = [
        Frame::Sync,
        Frame::Open { flow: 1, credit: 16_384 },
        ack(0),
        Frame::Data { flow: 1, offset: 0, length: 3 },
        Frame::Packed { flow: 1, head, payload: 3 },
        Frame::Miss { flow: 1, offset: 0 },
        Frame::Have { stay: false, hashes: vec![1] },
        Frame::Data { flow: 1, offset: 3, length: 9 },
        Frame::Finish { flow: 1, offset: 12 },
        Frame::Ping(4),
    ];
    let mut seeds = Vec::new();
    for role in 0..4_u8 {
        let side = if role % 2 == 0 { Role::Dialer } else { Role::Acceptor };
        let mut bytes = vec![role, 4];
        for frame in &frames {
            let is_of_acceptor = matches!(frame, Frame::Miss { .. } | Frame::Have { .. });
            let is_of_dialer = matches!(frame, Frame::Open { .. } | Frame::Packed { .. });
            if (side == Role::Dialer && is_of_dialer) || (side == Role::Acceptor && is_of_acceptor) {
                continue;
            }
            bytes.push(0);
            frame.encode(&mut bytes).expect("the frame keeps the rules");
            bytes.extend([5, 6, 5]);
        }
        bytes.extend([7, 5, 5]);
        seeds.push((format!("role-{role}"), bytes));
    }
    seeds
}
