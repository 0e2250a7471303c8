//! An engine in memory whose next token is a function of all tokens before it, so that a lost or
//! repeated token shows in everything that follows. It writes what vLLM 0.32 was measured to write,
//! with its traps: text that lags behind ids, stop strings held back, a prompt that ends inside
//! a character emitted whole.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use lastgasp_router::continuation::Endpoint;
use serde_json::{Value, json};

pub mod story;

/// Tokens: whole words, and bytes of characters that no single token holds.
const VOCABULARY: [&[u8]; 16] = [
    b" one",
    b" two",
    b" or",
    b" he",
    b" stop",
    b" s",
    b"top",
    b"\n",
    b" \xE2\x82\xAC",
    b"\xE4\xBD",
    b"\xA0",
    b"\xF0",
    b"\x9F",
    b"\xA6",
    b"\x80",
    b"",
];
/// Ends the sequence; it has no text.
pub const EOS: u32 = 15;
/// Offset of prompt characters as ids.
const PROMPT: u32 = 1000;
pub const CONTEXT: u64 = 120;

/// Which frontend is imitated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frontend {
    Python,
    Rust,
}

/// How an engine is set up.
#[derive(Debug, Clone, Copy)]
pub struct Fake {
    pub frontend: Frontend,
    /// Tokens in a chunk.
    pub interval: usize,
    /// Makes runs differ.
    pub salt: u64,
    /// Gives ids when asked.
    pub ids: bool,
}

fn mix(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

fn bytes(id: u32) -> Vec<u8> {
    match id.checked_sub(PROMPT) {
        Some(byte) => vec![u8::try_from(byte).unwrap()],
        None => VOCABULARY[id as usize].to_vec(),
    }
}

/// Bytes that a character at the end of `ids` still lacks.
fn lacking(ids: &[u32]) -> bool {
    let tail: Vec<u8> = ids.iter().rev().take(6).rev().flat_map(|id| bytes(*id)).collect();
    (1..=3.min(tail.len())).any(|n| {
        let lead = tail[tail.len() - n];
        let need = match lead {
            0xC0..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xF7 => 4,
            _ => 0,
        };
        need > n
    })
}

impl Fake {
    /// The token that follows.
    fn next(&self, ids: &[u32]) -> u32 {
        let completes = |id: &u32| matches!(id, 10 | 12 | 13 | 14);
        let last = ids.last().copied().unwrap_or(0);
        match last {
            9 => return 10,
            11 => return 12,
            12 => return 13,
            13 => return 14,
            _ => {}
        }
        let sum = ids.iter().fold(self.salt, |sum, id| mix(sum ^ u64::from(*id).wrapping_mul(0x9e37_79b9)));
        loop_pick(sum, |id| !completes(&id) && (id != EOS || sum.is_multiple_of(3)))
    }

    /// Everything that this engine would send for a request, as separate events. `None` is a 400.
    pub fn answer(&self, endpoint: Endpoint, body: &Value) -> Option<Vec<String>> {
        let prompt = prompt(endpoint, body, self.frontend);
        let asked = self.ids && body["return_token_ids"] == true;
        let budget = body["max_tokens"].as_u64().or_else(|| body["max_completion_tokens"].as_u64());
        let room = CONTEXT.saturating_sub(prompt.len() as u64);
        let default = if endpoint == Endpoint::Completions { 16 } else { room };
        let budget = budget.unwrap_or(default).min(room);
        if budget == 0 {
            return None;
        }
        let least = body["min_tokens"].as_u64().unwrap_or(0);
        let stops: Vec<String> = match &body["stop"] {
            Value::String(one) => vec![one.clone()],
            Value::Array(list) => list.iter().map(|s| s.as_str().unwrap().to_owned()).collect(),
            _ => Vec::new(),
        };
        let include = body["include_stop_str_in_output"] == true;
        let hold = if include { 0 } else { stops.iter().map(String::len).max().unwrap_or(1) - 1 };

        let mut writer = Writer::new(self, endpoint, body, asked, &prompt);
        let mut ids = prompt.clone();
        // Incremental detokenisation: from the prompt on if that ends inside a character (vllm#48853).
        let mut decoded = if lacking(&ids) { 0 } else { ids.len() };
        let mut text = String::new();
        let mut sent = 0;
        let mut produced: u64 = 0;
        let mut chunk: Vec<u32> = Vec::new();
        let mut floor = 0;
        loop {
            let mut next = self.next(&ids);
            if next == EOS && produced < least {
                next = 0;
            }
            ids.push(next);
            chunk.push(next);
            produced += 1;
            if !lacking(&ids) && next != EOS {
                let raw: Vec<u8> = ids[decoded..].iter().flat_map(|id| bytes(*id)).collect();
                text.push_str(&String::from_utf8(raw).unwrap());
                decoded = ids.len();
            }
            let mut finish = None;
            if next == EOS {
                finish = Some(("stop", Value::Null));
            } else if produced >= budget {
                finish = Some(("length", Value::Null));
            }
            let found = stops.iter().filter_map(|stop| {
                let mut begin = (floor + 1usize).saturating_sub(stop.len());
                while !text.is_char_boundary(begin) {
                    begin += 1;
                }
                text[begin..].find(stop.as_str()).map(|at| (begin + at + stop.len(), begin + at, stop))
            });
            if produced > least
                && let Some((end, start, stop)) = found.min_by_key(|(end, ..)| *end)
            {
                finish = Some(("stop", json!(stop)));
                text.truncate(if include { end } else { start });
            }
            floor = text.len();
            if finish.is_none() && chunk.len() < self.interval {
                continue;
            }
            let end = if finish.is_some() {
                text.len()
            } else {
                let mut end = text.len().saturating_sub(hold).max(sent);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                end
            };
            let released = text[sent.min(end)..end].to_owned();
            sent = end.max(sent);
            let done = finish.is_some();
            writer.chunk(&released, &std::mem::take(&mut chunk), finish, produced);
            if done {
                return Some(writer.finish(produced));
            }
        }
    }
}

fn loop_pick(mut sum: u64, fits: impl Fn(u32) -> bool) -> u32 {
    loop {
        let id = u32::try_from(sum % VOCABULARY.len() as u64).unwrap();
        if fits(id) {
            return id;
        }
        sum = mix(sum);
    }
}

fn prompt(endpoint: Endpoint, body: &Value, frontend: Frontend) -> Vec<u32> {
    let encode = |text: &str| text.bytes().map(|byte| PROMPT + u32::from(byte)).collect::<Vec<u32>>();
    if endpoint == Endpoint::Completions {
        return match &body["prompt"] {
            Value::String(text) => encode(text),
            list => serde_json::from_value(list.clone()).unwrap(),
        };
    }
    // The Rust frontend ignores it.
    if let Some(ids) = body["kv_transfer_params"].get("prompt_token_ids")
        && matches!(frontend, Frontend::Python)
    {
        return serde_json::from_value(ids.clone()).unwrap();
    }
    let mut text = String::new();
    for message in body["messages"].as_array().unwrap() {
        text.push_str(&format!("<{}>{}", message["role"].as_str().unwrap(), message["content"].as_str().unwrap()));
    }
    if body["continue_final_message"] != true {
        text.push_str("</><assistant>");
    }
    encode(&text)
}

/// Writes events in one frontend's way.
struct Writer {
    frontend: Frontend,
    endpoint: Endpoint,
    id: String,
    asked: bool,
    usage: bool,
    continuous: bool,
    logprobs: bool,
    offset: usize,
    prompt: Vec<u32>,
    first: bool,
    events: Vec<String>,
}

impl Writer {
    fn new(fake: &Fake, endpoint: Endpoint, body: &Value, asked: bool, prompt: &[u32]) -> Self {
        let usage = body["stream_options"]["include_usage"] == true;
        let kind = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        let mut writer = Self {
            frontend: fake.frontend,
            endpoint,
            id: format!("{kind}-{:x}", mix(fake.salt ^ prompt.len() as u64)),
            asked,
            usage,
            continuous: usage && body["stream_options"]["continuous_usage_stats"] == true,
            logprobs: body["logprobs"].is_number() || body["logprobs"] == true,
            offset: 0,
            prompt: prompt.to_vec(),
            first: true,
            events: Vec::new(),
        };
        match (endpoint, fake.frontend) {
            (Endpoint::Chat, Frontend::Python) => {
                writer.push(json!({ "index": 0, "delta": { "role": "assistant", "content": "" }, "logprobs": null, "finish_reason": null }), 0);
            }
            (Endpoint::Chat, Frontend::Rust) => writer.push(json!({ "index": 0, "delta": { "role": "assistant" } }), 0),
            (Endpoint::Completions, Frontend::Rust) => {
                let mut choice = json!({ "index": 0, "text": "" });
                if asked {
                    choice["token_ids"] = json!([]);
                }
                writer.push(choice, 0);
            }
            (Endpoint::Completions, Frontend::Python) => {}
        }
        writer
    }

    fn push(&mut self, mut choice: Value, produced: u64) {
        let object = if self.endpoint == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" };
        let mut top = json!({ "id": self.id, "object": object, "created": self.prompt.len(), "model": "m" });
        if self.asked && std::mem::take(&mut self.first) {
            if self.endpoint == Endpoint::Chat {
                top["prompt_token_ids"] = json!(self.prompt);
            } else {
                choice["prompt_token_ids"] = json!(self.prompt);
            }
        } else if self.frontend == Frontend::Python && self.endpoint == Endpoint::Completions {
            choice["prompt_token_ids"] = Value::Null;
        }
        top["choices"] = json!([choice]);
        if self.continuous {
            top["usage"] = self.counts(produced);
        }
        self.events.push(format!("data: {top}\n\n"));
    }

    fn counts(&self, produced: u64) -> Value {
        let prompt = self.prompt.len() as u64;
        json!({ "prompt_tokens": prompt, "total_tokens": prompt + produced, "completion_tokens": produced })
    }

    fn chunk(&mut self, text: &str, ids: &[u32], finish: Option<(&str, Value)>, produced: u64) {
        let mut choice = json!({ "index": 0 });
        if self.endpoint == Endpoint::Chat {
            let absent = text.is_empty() && self.frontend == Frontend::Rust;
            choice["delta"] = if absent { json!({}) } else { json!({ "content": text }) };
        } else {
            choice["text"] = json!(text);
        }
        if self.logprobs {
            let names: Vec<String> = ids.iter().map(|id| format!("t{id}")).collect();
            choice["logprobs"] = if self.endpoint == Endpoint::Chat {
                json!({ "content": names.iter().map(|name| json!({ "token": name, "logprob": -1.0 })).collect::<Vec<_>>() })
            } else {
                let mut offsets = Vec::new();
                for name in &names {
                    offsets.push(self.offset);
                    self.offset += name.len();
                }
                json!({ "text_offset": offsets, "token_logprobs": vec![-1.0; ids.len()], "tokens": names })
            };
        } else if self.frontend == Frontend::Python {
            choice["logprobs"] = Value::Null;
        }
        if self.asked {
            choice["token_ids"] = json!(ids);
        }
        match finish {
            Some((reason, stop_reason)) if self.frontend == Frontend::Python => {
                choice["finish_reason"] = json!(reason);
                choice["stop_reason"] = stop_reason;
                self.push(choice, produced);
            }
            Some((reason, stop_reason)) => {
                self.push(choice, produced);
                let mut last = json!({ "index": 0, "finish_reason": reason });
                last[if self.endpoint == Endpoint::Chat { "delta" } else { "text" }] =
                    if self.endpoint == Endpoint::Chat { json!({}) } else { json!("") };
                if !stop_reason.is_null() {
                    last["stop_reason"] = stop_reason;
                }
                if self.asked && self.endpoint == Endpoint::Completions {
                    last["token_ids"] = json!([]);
                }
                self.push(last, produced);
            }
            None => {
                if self.frontend == Frontend::Python {
                    choice["finish_reason"] = Value::Null;
                }
                self.push(choice, produced);
            }
        }
    }

    fn finish(mut self, produced: u64) -> Vec<String> {
        if self.usage {
            let object = if self.endpoint == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" };
            let usage = self.counts(produced);
            let top = json!({ "id": self.id, "object": object, "created": self.prompt.len(), "model": "m", "choices": [], "usage": usage });
            self.events.push(format!("data: {top}\n\n"));
        }
        self.events.push("data: [DONE]\n\n".to_owned());
        self.events
    }
}

/// What a client makes of a stream.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Client {
    pub text: String,
    pub finish: Vec<String>,
    pub stop_reason: Vec<Value>,
    pub roles: usize,
    pub usage: Option<Value>,
    pub usages: usize,
    pub ids: Vec<u64>,
    pub prompt_ids: Vec<Value>,
    pub logprobs: Vec<String>,
    pub offsets: Vec<u64>,
    pub names: Vec<String>,
    pub errors: Vec<Value>,
    pub dones: usize,
}

impl Client {
    /// Reads a whole stream as a strict client does.
    pub fn read(stream: &[u8]) -> Self {
        let mut client = Self::default();
        let lines = std::str::from_utf8(stream).unwrap().split_inclusive('\n');
        // Nothing hangs on a comment, nor here on an event's number.
        let text: String = lines.filter(|line| !line.starts_with(':') && !line.starts_with("id: ")).collect();
        assert!(text.is_empty() || text.ends_with("\n\n"), "ends inside an event");
        for event in text.split_terminator("\n\n") {
            let data = event.strip_prefix("data: ").unwrap();
            assert_eq!(client.dones, 0, "something follows [DONE]");
            if data == "[DONE]" {
                client.dones += 1;
                continue;
            }
            let chunk: Value = serde_json::from_str(data).unwrap();
            if chunk.get("error").is_some() {
                client.errors.push(chunk["error"].clone());
                continue;
            }
            assert!(client.errors.is_empty(), "something follows an error");
            let name = format!("{} {} {} {}", chunk["id"], chunk["object"], chunk["created"], chunk["model"]);
            if !client.names.contains(&name) {
                client.names.push(name);
            }
            if let Some(usage) = chunk.get("usage") {
                client.usage = Some(usage.clone());
                client.usages += usize::from(chunk["choices"] == json!([]));
            }
            if let Some(ids) = chunk.get("prompt_token_ids").filter(|ids| !ids.is_null()) {
                client.prompt_ids.push(ids.clone());
            }
            let Some(choice) = chunk["choices"].get(0) else { continue };
            if let Some(ids) = choice.get("prompt_token_ids").filter(|ids| !ids.is_null()) {
                client.prompt_ids.push(ids.clone());
            }
            assert!(client.finish.is_empty(), "something follows the finish_reason");
            client.text.push_str(choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default());
            client.roles += usize::from(choice["delta"]["role"].is_string());
            client.ids.extend(choice["token_ids"].as_array().into_iter().flatten().map(|id| id.as_u64().unwrap()));
            let logprobs = &choice["logprobs"];
            let tokens = logprobs["tokens"].as_array().or(logprobs["content"].as_array());
            for token in tokens.into_iter().flatten() {
                client.logprobs.push(token.as_str().or(token["token"].as_str()).unwrap().to_owned());
            }
            client
                .offsets
                .extend(logprobs["text_offset"].as_array().into_iter().flatten().map(|o| o.as_u64().unwrap()));
            if let Some(reason) = choice["finish_reason"].as_str() {
                client.finish.push(reason.to_owned());
                client.stop_reason.push(choice.get("stop_reason").cloned().unwrap_or_default());
            }
        }
        client
    }

    /// Complete, or visibly not.
    pub fn ended(&self) -> Result<(), &Value> {
        match self.errors.as_slice() {
            [] => {
                assert_eq!((self.dones, self.finish.len()), (1, 1), "neither an end nor an error: {self:?}");
                Ok(())
            }
            [error] => {
                assert_eq!(self.dones, 0, "an error and [DONE]");
                Err(error)
            }
            _ => panic!("several errors"),
        }
    }
}
