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
    let role = if role % 2 == 0 { Role::Dialer } else { Role::Acceptor };
    let settings = Settings::new(0);
    let most = settings.buffer_bytes;
    let mut session = Session::new(SessionId([1; 16]), role, settings);
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
                if session.receive(carriers[at], frame, payload, now).is_err() {
                    return;
                }
            }
            4 => {
                session.open(now);
                for flow in 1..4 {
                    let room = session.room(flow, now).min(100);
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
