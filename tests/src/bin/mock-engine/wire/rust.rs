//! Answers in the shape of `vllm-rs serve` 0.32.0: fields absent instead of null, a first
//! chunk for the prompt and a last one for the end.

use lastgasp_tests::model::{Endpoint, Finish, Piece, decode};
use serde_json::{Value, json};

use super::{Answer, Choice, CompletionLogprobs, Logprob, Usage, chat_logprobs};

pub(super) fn chunks(answer: &Answer, choice: &Choice, opens: bool, piece: &Piece, logprobs: &[Logprob]) -> Vec<Value> {
    let chat = answer.request.endpoint == Endpoint::Chat;
    let ids = answer.request.return_token_ids;
    let mut chunks = Vec::new();
    if opens && (chat || ids || answer.request.echo) {
        chunks.push(first_chunk(answer, choice));
    }
    // A chat has no chunk for a token without text, unless its id is asked for.
    if !piece.ids.is_empty() && (!chat || ids || !piece.text.is_empty()) {
        chunks.push(token_chunk(answer, choice, piece, logprobs));
    }
    if let Some(finish) = &piece.finish {
        chunks.push(last_chunk(answer, choice, finish));
    }
    chunks
}

fn first_chunk(answer: &Answer, choice: &Choice) -> Value {
    let ids = answer.request.return_token_ids;
    let usage = Usage { completion: 0, ..answer.usage_of(choice) };
    match answer.request.endpoint {
        Endpoint::Completions => {
            let echo = if answer.request.echo { decode(&choice.prompt) } else { String::new() };
            let mut entry = json!({"index": choice.index, "text": echo});
            if ids {
                entry["token_ids"] = json!([]);
                entry["prompt_token_ids"] = json!(choice.prompt);
            }
            chunk(answer, entry, usage)
        }
        Endpoint::Chat => {
            let entry = json!({"index": choice.index, "delta": {"role": "assistant"}});
            let mut chunk = chunk(answer, entry, usage);
            if ids {
                chunk["prompt_token_ids"] = json!(choice.prompt);
            }
            chunk
        }
    }
}

fn token_chunk(answer: &Answer, choice: &Choice, piece: &Piece, logprobs: &[Logprob]) -> Value {
    let mut entry = json!({"index": choice.index});
    match answer.request.endpoint {
        Endpoint::Completions => entry["text"] = json!(piece.text),
        Endpoint::Chat if piece.text.is_empty() => entry["delta"] = json!({}),
        Endpoint::Chat => entry["delta"] = json!({"content": piece.text}),
    }
    if !logprobs.is_empty() {
        entry["logprobs"] = logprobs_of(answer, logprobs);
    }
    if answer.request.return_token_ids {
        entry["token_ids"] = json!(piece.ids);
    }
    chunk(answer, entry, answer.usage_of(choice))
}

fn last_chunk(answer: &Answer, choice: &Choice, finish: &Finish) -> Value {
    let mut entry = json!({"index": choice.index});
    match answer.request.endpoint {
        Endpoint::Completions => entry["text"] = json!(""),
        Endpoint::Chat => entry["delta"] = json!({}),
    }
    entry["finish_reason"] = json!(finish.reason());
    match finish {
        Finish::StopString(stop) => entry["stop_reason"] = json!(stop),
        Finish::StopToken(id) => entry["stop_reason"] = json!(id),
        Finish::Length | Finish::EndOfSequence | Finish::Abort => {}
    }
    if answer.request.endpoint == Endpoint::Completions && answer.request.return_token_ids {
        entry["token_ids"] = json!([]);
    }
    chunk(answer, entry, answer.usage_of(choice))
}

fn chunk(answer: &Answer, entry: Value, counts: Usage) -> Value {
    let mut chunk = answer.begin(true);
    chunk["choices"] = json!([entry]);
    if answer.request.continuous_usage_stats {
        chunk["usage"] = usage(counts);
    }
    chunk
}

pub(super) fn usage_chunk(answer: &Answer) -> Value {
    let mut chunk = answer.begin(true);
    chunk["choices"] = json!([]);
    chunk["usage"] = usage(answer.usage());
    chunk
}

pub(super) fn unary(answer: &Answer) -> Value {
    let ids = answer.request.return_token_ids;
    let chat = answer.request.endpoint == Endpoint::Chat;
    let choices: Vec<Value> = answer
        .choices
        .iter()
        .map(|choice| {
            let mut entry = json!({"index": choice.index});
            if chat {
                entry["message"] = json!({
                    "role": "assistant", "content": choice.whole.text, "reasoning": null
                });
            } else {
                let echo = if answer.request.echo { decode(&choice.prompt) } else { String::new() };
                entry["text"] = json!(format!("{echo}{}", choice.whole.text));
            }
            entry["logprobs"] =
                if choice.logprobs.is_empty() { Value::Null } else { logprobs_of(answer, &choice.logprobs) };
            let finish = choice.whole.finish.as_ref();
            entry["finish_reason"] = json!(finish.map(Finish::reason));
            entry["stop_reason"] = match finish {
                Some(Finish::StopString(stop)) => json!(stop),
                Some(Finish::StopToken(id)) => json!(id),
                _ => Value::Null,
            };
            if !chat {
                entry["prompt_logprobs"] = Value::Null;
            }
            if ids {
                entry["token_ids"] = json!(choice.whole.ids);
                if !chat {
                    entry["prompt_token_ids"] = json!(choice.prompt);
                }
            }
            entry
        })
        .collect();
    let mut whole = answer.begin(false);
    whole["choices"] = json!(choices);
    whole["usage"] = usage(answer.usage());
    whole["system_fingerprint"] = Value::Null;
    if chat {
        whole["prompt_logprobs"] = Value::Null;
        if ids {
            whole["prompt_token_ids"] = json!(answer.choices[0].prompt);
        }
    }
    whole["kv_transfer_params"] = Value::Null;
    whole["ec_transfer_params"] = Value::Null;
    whole
}

fn logprobs_of(answer: &Answer, logprobs: &[Logprob]) -> Value {
    match answer.request.endpoint {
        Endpoint::Chat => chat_logprobs(logprobs),
        Endpoint::Completions => {
            let lists = CompletionLogprobs::new(logprobs);
            json!({
                "tokens": lists.tokens, "token_logprobs": lists.values,
                "top_logprobs": lists.top, "text_offset": lists.offsets
            })
        }
    }
}

fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion,
        "prompt_tokens_details": null,
        "completion_tokens_details": {"reasoning_tokens": 0}
    })
}
